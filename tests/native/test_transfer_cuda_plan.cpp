// Which path a view's runs take, and how copies are grouped. No driver, fake or real.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/copy_ways.h"

using namespace flexkv;
using namespace flexkv::cuda;

TEST_CASE("cuda plan: the path of a run follows from its own length and from what there is") {
  const Capabilities all{true, true, 1 << 20};
  const auto longest = [](const Ways& ways) {
    int64_t most = -1;
    for (size_t i = 0; i < kRunLengths.size(); ++i) {
      if (ways.kernel_from[i] == 1) most = kRunLengths[i];
    }
    return most;
  };
  CHECK(longest(usual_ways(all)) == 32 << 10);  // the common length itself is the kernel's
  CHECK(engine_path(all) == Path::kBatch);
  const Capabilities no_batch{true, false, 1 << 20};
  CHECK(longest(usual_ways(no_batch)) == 256 << 10);
  CHECK(engine_path(no_batch) == Path::kPitched);
  CHECK(engine_path({false, false, 0}) == Path::kSingle);

  // MLA with an indexer: by the mean of 36 KiB the short runs went with the long ones.
  const Segment segments[] = {
      {1 << 20, 1, 32 << 10, 0, 0}, {1 << 21, 1, 72 << 10, 1, 0}, {1 << 22, 1, 4 << 10, 2, 1}};
  const SplitRuns split = split_runs(segments, 1, usual_ways(all));
  CHECK(split.by_kernel == std::vector<Segment>{segments[0], segments[2]});
  CHECK(split.by_engine == std::vector<Segment>{segments[1]});
  CHECK(split_runs(segments, 1, usual_ways({false, true, 1 << 20})).by_kernel.empty());
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

TEST_CASE("cuda plan: no copy and no rows have bytes of two layers that were allocated apart") {
  std::byte host[4096];
  constexpr uintptr_t kBase = 1 << 20;
  // Layers right behind each other, of two blocks each; and of one block, which continue each other.
  const Segment layers[] = {
      {kBase, 100, 100, 0, 0}, {kBase + 200, 100, 100, 100, 1}, {kBase + 400, 100, 100, 200, 2}};
  const Segment single[] = {{kBase, 100, 100, 0, 0}, {kBase + 100, 100, 100, 100, 1}};
  const PageEnds pages[] = {{1, host}};
  const PageEnds first[] = {{0, host}};
  auto copies = list_copies(layers, pages);
  CHECK(group_rows(copies, 1 << 20).size() == 3);
  CHECK(list_copies(single, first).size() == 2);
  for (Copy& copy : copies) copy.region = 0;  // control: in one region they are rows of one copy
  CHECK(group_rows(copies, 1 << 20).size() == 1);
  // All layers in a block: one region, whose layers continue each other.
  const Segment together[] = {{kBase, 200, 100, 0, 0}, {kBase + 100, 200, 100, 100, 1}};
  CHECK(list_copies(together, pages).size() == 1);
}

TEST_CASE("cuda plan: no copy and no rows have bytes of two pieces of registered memory") {
  std::byte host[4096];
  const Segment segment{1 << 20, 300, 300, 0, 0};
  // Neighbours at both ends; the third page's slot was registered apart.
  const PageEnds pages[] = {{0, host, 4}, {1, host + 300, 4}, {2, host + 600, 5}, {3, host + 900, 5}};
  const auto copies = list_copies(std::span(&segment, 1), pages);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].bytes == 600);
  CHECK(copies[1].host == host + 600);

  std::vector<Copy> rows;
  for (uintptr_t i = 0; i < 8; ++i)
    rows.push_back({(1 << 20) + i * 256, host + i * 400, 100, i < 5 ? 0 : 1, 0});
  const auto groups = group_rows(rows, 1 << 20);
  REQUIRE(groups.size() == 2);
  CHECK(groups[0].rows == 5);
  for (Copy& row : rows) row.piece = 0;  // control: in one piece they are one copy
  CHECK(group_rows(rows, 1 << 20).size() == 1);
}

TEST_CASE("cuda plan: rows of equal steps are one pitched copy, in the order that needs fewer") {
  std::vector<std::byte> host(1 << 16);
  // Four layers, eight neighbouring blocks: along the pages 8 groups of 4 rows, along the runs 4 groups of 8.
  std::vector<Copy> copies;
  for (uintptr_t block = 0; block < 8; ++block) {
    for (uintptr_t layer = 0; layer < 4; ++layer) {
      copies.push_back(
          {(1 << 20) + layer * 64 * 1024 + block * 256, host.data() + block * 4096 + layer * 100, 100});
    }
  }
  auto groups = group_rows(copies, 1 << 20);
  REQUIRE(groups.size() == 4);
  CHECK(groups[0].rows == 8);
  CHECK(groups[0].device_step == 256);
  CHECK(groups[0].host_step == 4096);
  // Steps beyond the device's pitch are not taken.
  for (const PitchedCopy& group : group_rows(copies, 300)) CHECK(group.rows == 1);
  size_t rows = 0;
  for (const PitchedCopy& group : group_rows(copies, 5000)) rows += group.rows;
  CHECK(rows == copies.size());
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

TEST_CASE("cuda plan: portions are as long as each other") {
  constexpr int64_t kMiB = 1 << 20;
  for (const int64_t most : {kMiB, 5 * kMiB, 8 * kMiB}) {
    for (int64_t bytes = 1; bytes < 64 * kMiB; bytes += bytes / 3 + 4097) {
      const int64_t portion = portion_bytes(bytes, most);
      CHECK(portion <= most);
      const int64_t portions = (bytes + portion - 1) / portion;
      CHECK(portions == (bytes + most - 1) / most);  // no more than there must be
      // What rounding takes from the last.
      CHECK(bytes - (portions - 1) * portion >= std::min(bytes, portion) - portions * (64 << 10));
    }
  }
  CHECK(portion_bytes(5 * kMiB + kMiB / 4, 5 * kMiB) == 2752512);
}

TEST_CASE("cuda plan: portions keep every byte in its place, and none is larger than it may be") {
  const std::vector<Segment> segments = {{1000, 64, 10, 0, 0}, {2000, 64, 0, 10, 0}, {3000, 64, 25, 10, 1}};
  const auto portions = cut_to_portions(segments, 12);
  const std::vector<std::vector<Segment>> expected = {
      {{1000, 64, 10, 0, 0}, {3000, 64, 2, 10, 1}},
      {{3002, 64, 12, 12, 1}},
      {{3014, 64, 11, 24, 1}},
  };
  CHECK(portions == expected);
  CHECK(cut_to_portions(segments, 35).size() == 1);
}
