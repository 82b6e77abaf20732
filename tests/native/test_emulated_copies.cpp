// Runs the copy kernel and the rotation kernel on the CPU, with all warps at once, and compares the results
// with those of the CPU's own code. The last test checks how many thread blocks a kernel is launched with.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "emulated_cuda.h"
// These headers must come after emulated_cuda.h, which defines the CUDA names that they use.
#include "cuda/copy_kernel.cuh"
#include "rope/rotate.h"
#include "rope/rotate_dispatch.h"
#include "rope/rotate_kernel.cuh"
#include "soak.h"

using namespace flexkv;

namespace {

constexpr unsigned kBlocks = 3, kBlockThreads = 64;

using ByteVector = std::vector<unsigned char>;

ByteVector random_bytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  ByteVector bytes(count);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// A pool with two layers of four blocks, and pages of two of these blocks in host memory. All addresses are
// `skew` bytes past an aligned address.
struct CopyWorld {
  CopyWorld(int64_t run, int64_t skew)
      : pool(static_cast<size_t>(8 * (run + skew) + 64)), pages(static_cast<size_t>(4 * run + 64)) {
    const auto at = [&](ByteVector& bytes) {
      return (reinterpret_cast<uintptr_t>(bytes.data()) + 15) / 16 * 16 + static_cast<uintptr_t>(skew);
    };
    for (int32_t layer = 0; layer < 2; ++layer) {
      segments.push_back(
          {at(pool) + static_cast<uintptr_t>(layer * 4 * (run + skew)), run + skew, run, layer * run, layer});
    }
    chunks = cuda::cut_to_chunks(segments.data(), segments.size());
    where = {{2, at(pages)}, {0, at(pages) + static_cast<uintptr_t>(2 * run)}};
  }

  // Whether pool and pages have the same bytes after the kernel as after plain copies of complete runs.
  // `with_launch`: the kernel gets its tables as launch parameters instead of in memory.
  bool copies_alike(bool to_device, bool with_launch) {
    const ByteVector pool_before = random_bytes(pool.size(), 1), pages_before = random_bytes(pages.size(), 2);
    std::copy(pool_before.begin(), pool_before.end(), pool.begin());
    std::copy(pages_before.begin(), pages_before.end(), pages.begin());
    const cuda::CopyJob job{chunks.data(), where.data(), static_cast<int32_t>(chunks.size()),
                            static_cast<int32_t>(where.size()), to_device};
    if (with_launch) {
      cuda::LaunchTables tables;
      std::memcpy(tables.bytes, chunks.data(), chunks.size() * sizeof(chunks[0]));
      std::memcpy(tables.bytes + chunks.size() * sizeof(chunks[0]), where.data(),
                  where.size() * sizeof(where[0]));
      cuda::CopyJob without = job;
      without.chunks = nullptr;
      without.pages = nullptr;
      emulated::launch(kBlocks, kBlockThreads, [&] { cuda::copy_kernel_with_tables(without, tables); });
    } else {
      emulated::launch(kBlocks, kBlockThreads, [&] { cuda::copy_kernel(job); });
    }
    const ByteVector pool_after = pool, pages_after = pages;
    std::copy(pool_before.begin(), pool_before.end(), pool.begin());
    std::copy(pages_before.begin(), pages_before.end(), pages.begin());
    for (const Segment& segment : segments) {
      for (const cuda::CopyPage& page : where) {
        auto* device = reinterpret_cast<void*>(run_address(segment, page.block));
        auto* host = reinterpret_cast<void*>(page.host + static_cast<uintptr_t>(segment.page_offset));
        std::memcpy(to_device ? device : host, to_device ? host : device,
                    static_cast<size_t>(segment.run_bytes));
      }
    }
    return pool == pool_after && pages == pages_after;
  }

  ByteVector pool, pages;
  std::vector<Segment> segments;
  std::vector<cuda::CopyChunk> chunks;
  std::vector<cuda::CopyPage> where;
};

// Rows that are rotated, copied or zeroed while they move from one pool to another. The pools' addresses are
// `skew` bytes past the alignment of vectors.
template <typename Kind>
struct RotationWorld {
  using Element = typename Kind::Element;
  static constexpr int32_t kHeads = 3, kHeadDim = 80, kRotaryDim = 64, kRows = 13, kTurns = 4;
  static constexpr int64_t kRowBytes = int64_t{sizeof(Element)} * kHeads * kHeadDim;

  explicit RotationWorld(int64_t skew) : src(values(skew)), dst(random_bytes(src.size(), 3)) {
    std::mt19937 random(4);
    std::uniform_real_distribution<float> angle(-4.0f, 4.0f);
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      std::vector<float> sines;
      for (int32_t pair = 0; pair < kRotaryDim / 2; ++pair) {
        const float a = angle(random);
        turns.push_back(std::cos(a));
        sines.push_back(std::sin(a));
      }
      turns.insert(turns.end(), sines.begin(), sines.end());
    }
    for (int32_t row = 0; row < kRows; ++row) {
      from.push_back(row * kRowBytes);
      to.push_back((kRows - 1 - row) * kRowBytes);
      turn_of_row.push_back(row % 6 == 4 ? kZeroRow : row % 6 == 5 ? kCopyRow : row % kTurns);
    }
    rows.src = aligned(src) + skew;
    rows.src_offsets = from.data();
    rows.dst_offsets = to.data();
    rows.turn_of_row = turn_of_row.data();
    rows.turns = turns.data();
    rows.src_head_stride = rows.dst_head_stride = int64_t{sizeof(Element)} * kHeadDim;
    rows.rows = kRows;
    rows.heads = kHeads;
    rows.head_dim = kHeadDim;
    rows.rotary_dim = kRotaryDim;
    rows.dst = aligned(dst) + skew;
  }

  static unsigned char* aligned(ByteVector& bytes) {
    return bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16;
  }
  static ByteVector values(int64_t skew) {
    ByteVector bytes(static_cast<size_t>(kRows * kRowBytes + 64));
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    unsigned char* at = aligned(bytes) + skew;
    for (int64_t i = 0; i < kRows * kHeads * kHeadDim; ++i, at += sizeof(Element)) {
      Element element{};
      from_float(normal(random), element);
      std::memcpy(at, &element, sizeof element);
    }
    return bytes;
  }

  // The rows point into this object's own memory, so the object must not be copied.
  RotationWorld(const RotationWorld&) = delete;
  RotationWorld& operator=(const RotationWorld&) = delete;

  bool turns_alike(ElementType type) {
    const ByteVector before = dst;
    emulated::launch(kBlocks, kBlockThreads, [&] { rotate_kernel<Element, Kind::kPairing>(rows); });
    const ByteVector by_kernel = dst;
    std::copy(before.begin(), before.end(), dst.begin());
    rotate_on_host(rows, type, Kind::kPairing);
    return dst == by_kernel && dst != before;
  }

  ByteVector src, dst;
  std::vector<float> turns;
  std::vector<int64_t> from, to;
  std::vector<int32_t> turn_of_row;
  RotationRows rows;
};

template <typename Check>
void with_every_rotation(const Check& check) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kBfloat16, ElementType::kFloat16}) {
    for (const Pairing pairing : {Pairing::kNeox, Pairing::kGptj}) {
      dispatch_rotation(type, pairing, [&](auto kind) { check(kind, type); });
    }
  }
}

}  // namespace

TEST_CASE(
    "emulated: the copy kernel moves every byte of its runs and no other, whatever size and alignment") {
  const std::vector<int64_t> all = {1, 15, 17, 144, 656, 1152, 4096, 8191, 8192, 8193, 73728};
  for (const int64_t run : kThreadSanitizer ? std::vector<int64_t>{656} : all) {
    for (const int64_t skew : kThreadSanitizer ? std::vector<int64_t>{1} : std::vector<int64_t>{0, 1, 4, 8}) {
      CAPTURE(run);
      CAPTURE(skew);
      CopyWorld world(run, skew);
      for (const bool with_launch : {false, true}) {
        CHECK(world.copies_alike(false, with_launch));
        CHECK(world.copies_alike(true, with_launch));
      }
    }
  }
}

namespace {

// What a forward pass observed of a load of two layers that ran at the same time, and whether the kernel's
// counters had the right values at the end.
struct LayersSeen {
  bool early = false;   // a wait for a layer ended before the layer's bytes were there
  bool beside = false;  // the wait for layer 0 ended before the kernel counted layer 1
  bool counted = false;
};

// `counted_before`: the value of the first stage's warp counter before the kernel starts. `first_is_empty`:
// the first layer's chunks belong to the second stage, so that the first stage has none.
LayersSeen load_layers(unsigned counted_before, bool first_is_empty) {
  CopyWorld world(73728, 0);
  const ByteVector pages = random_bytes(world.pages.size(), 2);
  world.pages = pages;
  const auto half = static_cast<int32_t>(world.chunks.size() / 2);
  const std::array<int32_t, 2> stage_ends{first_is_empty ? 0 : half, 2 * half};
  std::array<uint32_t, 2> warps{counted_before, 0};
  uint32_t passed = 0xFFFFFFFF;  // the first stage that is counted increments it to 0
  cuda::CopyJob job{world.chunks.data(), world.where.data(), 2 * half,
                    static_cast<int32_t>(world.where.size()), true};
  job.stage_ends = stage_ends.data();
  job.stage_count = 2;
  job.words = {warps.data(), &passed};
  LayersSeen seen;
  std::thread forward([&] {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      cuda::wait_kernel(&passed, layer);
      if (layer == 0) seen.beside = cuda::read_word(&passed) == 0;
      const Segment& segment = world.segments[layer];
      // Does not compare the bytes under ThreadSanitizer. It would report a race here, because the emulation
      // lacks CUDA's fences, which prevent this race.
      for (const cuda::CopyPage& page : kThreadSanitizer ? std::vector<cuda::CopyPage>{} : world.where) {
        const auto* from =
            reinterpret_cast<const void*>(page.host + static_cast<uintptr_t>(segment.page_offset));
        const auto* to = reinterpret_cast<const void*>(run_address(segment, page.block));
        if (std::memcmp(from, to, static_cast<size_t>(segment.run_bytes)) != 0) seen.early = true;
      }
    }
  });
  emulated::launch(kBlocks, kBlockThreads, [&] { cuda::copy_kernel(job); });
  forward.join();
  seen.counted = passed == 1 && warps == std::array<uint32_t, 2>{};
  return seen;
}

// Whether `check` holds in at least one of several rounds. One round is not enough, because the result
// depends on the order in which the threads run.
template <typename Check>
bool in_some_round(const Check& check) {
  for (int round = 0; round < 100; ++round) {
    if (check()) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("emulated: the copy kernel counts each layer when its bytes are there, and before the next one's") {
  for (int round = 0; round < (kThreadSanitizer ? 4 : 20); ++round) {
    const LayersSeen seen = load_layers(0, false);
    CHECK(!seen.early);
    CHECK(seen.counted);
  }
  CHECK(in_some_round([] { return load_layers(0, false).beside; }));
}

TEST_CASE("emulated, control: a layer that is counted before its bytes are there is found") {
  if (!kThreadSanitizer) CHECK(in_some_round([] { return load_layers(0, true).early; }));
}

TEST_CASE("emulated, control: a layer that was counted too often is found") {
  CHECK(!load_layers(1, false).counted);
}

TEST_CASE("emulated: the rotation kernel gives the CPU's bits for all element types and pairings") {
  with_every_rotation([](auto kind, ElementType type) {
    for (const int64_t skew : {0, 4}) {
      CAPTURE(skew);
      RotationWorld<decltype(kind)> world(skew);
      CHECK(world.turns_alike(type));
    }
  });
}

TEST_CASE("emulated, control: a launch without its last block does not pass for a whole one") {
  const emulated::WithFaults broken({.blocks_left_out = 1});
  CHECK(!CopyWorld(73728, 0).copies_alike(false, false));
  with_every_rotation(
      [](auto kind, ElementType type) { CHECK(!RotationWorld<decltype(kind)>(0).turns_alike(type)); });
}

TEST_CASE("emulated, control: a chunk that is one byte short is found") {
  CopyWorld world(656, 0);
  world.chunks[1].bytes -= 1;
  CHECK(!world.copies_alike(false, true));
  CHECK(!world.copies_alike(true, false));
}

TEST_CASE("a launch takes one full block a multiprocessor, and no more than its work needs") {
  CHECK(blocks_for(0, kFullBlockThreads, 8) == 0);
  CHECK(blocks_for(1, kFullBlockThreads, 8) == 1);
  CHECK(blocks_for(32, kFullBlockThreads, 8) == 1);
  CHECK(blocks_for(33, kFullBlockThreads, 8) == 2);
  // With more work, the launch still has only eight blocks of 1,024 threads if eight is the maximum.
  for (const int64_t items : {int64_t{8 * 32}, int64_t{8 * 32 + 1}, int64_t{1} << 40, INT64_MAX}) {
    CHECK(blocks_for(items, kFullBlockThreads, 8) == 8);
  }
  CHECK(blocks_for(1'000'000, kFullBlockThreads, 1) == 1);
  CHECK(blocks_for(17, kRotateThreads, 2048) == 3);
}
