// Tests by which path the runs of a view are copied, and how copies are grouped. These tests call no CUDA
// driver, neither a fake nor a real one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/copy_ways.h"
#include "fake_cuda.h"

using namespace flexkv;
using namespace flexkv::cuda;
using fake_cuda::run_on_cpu;

namespace {

std::vector<Copy> list_copies(std::span<const Segment> segments, std::span<const PageEnds> pages) {
  std::vector<Copy> copies;
  CopyLister lister(segments, pages, INT64_MAX);
  lister.next(INT64_MAX, SIZE_MAX, copies);
  CHECK(lister.ended());
  return copies;
}

}  // namespace

TEST_CASE("cuda plan: the way of a run follows from its own length and from what there is") {
  const Capabilities all{true, true};
  CHECK(kernel_below(all, Direction::kToDevice) == 64 << 10);
  CHECK(kernel_below({true, false}, Direction::kToDevice) == 512 << 10);
  CHECK(kernel_below({true, false}, Direction::kToHost) == INT64_MAX);
  for (const Direction direction : {Direction::kToDevice, Direction::kToHost}) {
    CHECK(kernel_below({false, true}, direction) == 0);
  }
  CHECK(describe_ways(all, Direction::kToHost) ==
        "kernel for all runs of registered memory, 1 multiprocessor; others in batches");
  CHECK(describe_ways(all, Direction::kToDevice) ==
        "kernel for runs below 64 KiB, 2 multiprocessors; others in batches");
  CHECK(describe_ways({false, false}, Direction::kToHost) == "one by one");

  // These are the runs of a model with MLA and an indexer. A decision by the mean length of the runs, 36 KiB,
  // would put the short runs on the path of the long ones.
  const Segment segments[] = {
      {1 << 20, 1, 31 << 10, 0, 0}, {1 << 21, 1, 72 << 10, 1, 0}, {1 << 22, 1, 4 << 10, 2, 1}};
  const SplitRuns split = split_runs(segments, 32 << 10);
  CHECK(split.by_kernel == std::vector<Segment>{segments[0], segments[2]});
  CHECK(split.by_engine == std::vector<Segment>{segments[1]});
  CHECK(split_runs(segments, 0).by_kernel.empty());
}

TEST_CASE("cuda plan: copies come so many at a time, none longer than allowed, and each byte once") {
  std::vector<std::byte> host(1 << 16);
  const Segment segments[] = {
      {1 << 20, 4096, 1000, 0, 0}, {1 << 21, 4096, 0, 1000, 1}, {1 << 22, 4096, 3000, 1000, 2}};
  const PageEnds pages[] = {{0, host.data()}, {3, host.data() + 8000}, {1, host.data() + 20000}};
  for (const int64_t longest : {int64_t{7}, int64_t{1000}, int64_t{2999}, INT64_MAX}) {
    for (const int64_t most : {int64_t{5}, int64_t{999}, int64_t{4000}, INT64_MAX}) {
      for (const size_t count : {size_t{1}, size_t{3}, SIZE_MAX}) {
        CAPTURE(longest);
        CAPTURE(most);
        std::vector<int> seen(host.size());
        CopyLister lister(segments, pages, longest);
        std::vector<Copy> copies;
        int64_t all = 0;
        while (!lister.ended()) {
          const int64_t bytes = lister.next(most, count, copies);
          REQUIRE(bytes > 0);
          CHECK(bytes <= most);
          CHECK(copies.size() <= count);
          all += bytes;
          for (const Copy& copy : copies) {
            CHECK(copy.bytes <= static_cast<size_t>(longest));
            const auto at = copy.host - host.data();
            // The page and the run to which the copied bytes belong.
            const PageEnds& page = pages[at < 8000 ? 0 : at < 20000 ? 1 : 2];
            const auto offset = at - (page.stripe - host.data());
            const Segment& run = segments[offset < 1000 ? 0 : 2];
            CHECK(copy.device ==
                  run_address(run, page.block) + static_cast<uintptr_t>(offset - run.page_offset));
            for (size_t i = 0; i < copy.bytes; ++i) ++seen[static_cast<size_t>(at) + i];
          }
        }
        CHECK(lister.next(most, count, copies) == 0);
        CHECK(all == 3 * 4000);
        for (size_t i = 0; i < seen.size(); ++i) {
          const bool wanted = i < 4000 || (i >= 8000 && i < 12000) || (i >= 20000 && i < 24000);
          REQUIRE(seen[i] == (wanted ? 1 : 0));
        }
      }
    }
  }
}

TEST_CASE("cuda plan: copies that continue each other are one, empty ones none") {
  std::byte host[4096];
  const uintptr_t base = 1 << 20;
  const Segment segments[] = {
      {base, 300, 100, 0, 0}, {base + 100, 300, 0, 100, 0}, {base + 100, 300, 200, 100, 0}};
  const PageEnds pages[] = {{0, host}, {1, host + 300}, {2, host + 1000}};
  const auto copies = list_copies(segments, pages);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].bytes == 600);
  CHECK(copies[1].device == base + 600);
  CHECK(copies[1].host == host + 1000);
}

TEST_CASE("cuda plan: no copy has bytes of two layers that were allocated apart") {
  std::byte host[4096];
  constexpr uintptr_t kBase = 1 << 20;
  // Each layer has one block, and the layers are contiguous.
  const Segment single[] = {{kBase, 100, 100, 0, 0}, {kBase + 100, 100, 100, 100, 1}};
  const PageEnds pages[] = {{1, host}};
  const PageEnds first[] = {{0, host}};
  CHECK(list_copies(single, first).size() == 2);
  // Control: a block has all layers, so that they are one region of memory.
  const Segment together[] = {{kBase, 200, 100, 0, 0}, {kBase + 100, 200, 100, 100, 1}};
  CHECK(list_copies(together, pages).size() == 1);
}

TEST_CASE("cuda plan: no copy has bytes of two pieces of registered memory") {
  std::byte host[4096];
  const Segment segment{1 << 20, 300, 300, 0, 0};
  // Blocks and slots are contiguous; the slots of the third and fourth page were registered separately from
  // the first two.
  PageEnds pages[] = {{0, host, 4}, {1, host + 300, 4}, {2, host + 600, 5}, {3, host + 900, 5}};
  const auto copies = list_copies(std::span(&segment, 1), pages);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].bytes == 600);
  CHECK(copies[1].host == host + 600);
  for (PageEnds& page : pages) page.piece = 4;  // control: with a single registration the pages are one copy
  CHECK(list_copies(std::span(&segment, 1), pages).size() == 1);
}

TEST_CASE("cuda plan: the kernel's functor moves every byte of odd runs at odd places, and no other") {
  for (const int64_t run : {1, 3, 4, 8, 12, 15, 16, 31, 100, 8192, 8193, 20'001}) {
    for (const int64_t shift : {0, 1, 4, 8}) {
      const int64_t stride = run + 24;
      std::vector<std::byte> pool(static_cast<size_t>(4 * stride + 64), std::byte{0xEE});
      std::vector<std::byte> stripes(static_cast<size_t>(2 * run + 64), std::byte{0xAA});
      auto* base = pool.data() + (16 - reinterpret_cast<uintptr_t>(pool.data()) % 16) + shift;
      for (int64_t i = 0; i < run; ++i) base[2 * stride + i] = static_cast<std::byte>(i * 7 + 1);
      const Segment segment{reinterpret_cast<uintptr_t>(base), stride, run, 0, 0};
      const auto chunks = cut_to_chunks(&segment, 1);
      auto* stripe = stripes.data() + (16 - reinterpret_cast<uintptr_t>(stripes.data()) % 16) + shift;
      const CopyPage out{2, reinterpret_cast<uintptr_t>(stripe)};
      run_on_cpu({chunks.data(), &out, static_cast<int32_t>(chunks.size()), 1, false}, 3);
      CHECK(std::memcmp(stripe, base + 2 * stride, static_cast<size_t>(run)) == 0);
      CHECK(stripe[run] == std::byte{0xAA});
      const CopyPage in{0, reinterpret_cast<uintptr_t>(stripe)};
      run_on_cpu({chunks.data(), &in, static_cast<int32_t>(chunks.size()), 1, true}, 2);
      CHECK(std::memcmp(base, stripe, static_cast<size_t>(run)) == 0);
      CHECK(base[run] == std::byte{0xEE});
      CHECK(base[-1] == std::byte{0xEE});
    }
  }
}

TEST_CASE("cuda plan: a kernel that is told to stop begins nothing more, and another does not care") {
  std::vector<std::byte> pool(64 * 256, std::byte{7}), stripes(64 * 256);
  const Segment segment{reinterpret_cast<uintptr_t>(pool.data()), 256, 256, 0, 0};
  const auto chunks = cut_to_chunks(&segment, 1);
  std::vector<CopyPage> pages;
  for (int64_t i = 0; i < 64; ++i) {
    pages.push_back({i, reinterpret_cast<uintptr_t>(stripes.data() + i * 256)});
  }
  uint32_t word = 5;
  CopyJob job{chunks.data(), pages.data(), 1, 64, false, &word, 5};
  run_on_cpu(job, 3);
  CHECK(std::count(stripes.begin(), stripes.end(), std::byte{7}) == 0);
  job.number = 6;
  run_on_cpu(job, 3);
  CHECK(stripes == pool);
}
