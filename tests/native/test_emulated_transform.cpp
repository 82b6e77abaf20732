// Runs the transform kernel on the CPU, with all warps at once, and compares the results with those of the
// CPU's own transform.
#include <doctest/doctest.h>

#include "emulated_cuda.h"
// This header must come after emulated_cuda.h, which defines the CUDA names that it uses.
#include "gds/transform/kernel.cuh"
#include "gds/transform/tables.h"
#include "soak.h"
#include "testing/transform_lanes.h"
#include "transform_world.h"

using namespace flexkv;

namespace {

// The numbers are small, because each CUDA thread is a thread of the operating system.
constexpr unsigned kBlocks = 2, kBlockThreads = 64;

void run_transform(const TransformBatch& batch) {
  emulated::launch(kBlocks, kBlockThreads, [&] {
    if (in_pool(batch.mode)) {
      transform_kernel<true, false>(batch);
    } else if (has_digests(batch.mode)) {
      transform_kernel<true, true>(batch);
    } else {
      transform_kernel<false, true>(batch);
    }
  });
}

std::shared_ptr<TransformDevice> emulated_device() {
  return transform_device_of("host, as a GPU would", &run_transform);
}

// Whether the kernel writes the same bytes and digests into the slots as the CPU's transform.
bool stores_alike(TransformWorld& world) {
  put(world.slots, random_bytes(world.slots.size(), 2));
  world.move(*host_transform_device(), false);
  const ByteVector expected = world.slots;
  put(world.slots, random_bytes(world.slots.size(), 2));
  world.move(*emulated_device(), false);
  return world.slots == expected;
}

// Whether the kernel copies the slots' bytes back into the pool, finds every digest right, and changes
// nothing else.
bool loads_alike(TransformWorld& world) {
  const ByteVector before = random_bytes(world.pool.size(), 3);
  put(world.pool, before);
  world.move(*host_transform_device(), true);
  const ByteVector expected = world.pool;
  put(world.pool, before);
  const BatchResult result = world.move(*emulated_device(), true);
  return world.pool == expected &&
         result.bad_run == std::vector<int32_t>(static_cast<size_t>(world.num_blocks), kNoBadRun);
}

// Writes digests of the bytes in the pool into a copy of the slots, and returns the copy. If `emulated` is
// true, the kernel computes the digests; otherwise the CPU computes them lane by lane.
ByteVector digests_in_pool(const TransformWorld& world, bool emulated) {
  const TransformTables tables(*world.map, false);
  ByteVector slots = world.slots;
  std::vector<TransformPage> pages = world.pages();
  const auto moved =
      reinterpret_cast<uintptr_t>(slots.data()) - reinterpret_cast<uintptr_t>(world.slots.data());
  for (TransformPage& page : pages) page.slot += moved;
  std::vector<RunProgress> progress(pages.size() * tables.runs.size());
  std::vector<int32_t> bad(pages.size(), kNoBadRun);
  TransformBatch batch = host_batch(tables);
  batch.mode = TransformMode::kDigestInPool;
  batch.pages = pages.data();
  batch.num_pages = static_cast<int32_t>(pages.size());
  batch.progress = progress.data();
  batch.bad_run = bad.data();
  emulated ? run_transform(batch) : transform_lane_by_lane(batch);
  return slots;
}

}  // namespace

TEST_CASE(
    "emulated: the transform kernel moves and digests as the CPU does, whatever the size and alignment") {
  const std::vector<int64_t> all = {1, 15, 17, 144, 656, 1152, 4095, 4096, 4097, 9000, 73728};
  for (const int64_t run : kThreadSanitizer ? std::vector<int64_t>{4097} : all) {
    for (const int64_t skew : kThreadSanitizer ? std::vector<int64_t>{1} : std::vector<int64_t>{0, 1, 4, 8}) {
      if (run == 73728 && skew % 8 != 0) continue;
      CAPTURE(run);
      CAPTURE(skew);
      TransformWorld world(2, run, skew, 3);
      CHECK(stores_alike(world));
      CHECK(loads_alike(world));
    }
  }
}

TEST_CASE("emulated: the transform kernel digests and verifies in the pool") {
  TransformWorld world(3, 5000, 8, 3);
  world.move(*host_transform_device(), false);
  const ByteVector by_kernel = digests_in_pool(world, true);
  CHECK(by_kernel == digests_in_pool(world, false));
  CHECK(by_kernel == world.slots);  // the digests that were computed during the copy are the same
}

TEST_CASE("emulated: the transform kernel names the run with a flipped byte") {
  TransformWorld world(4, 5000, 0, 3);
  world.move(*host_transform_device(), false);
  const ByteVector good = world.slots;
  std::mt19937 random(5);
  for (int i = 0; i < 12; ++i) {
    put(world.slots, good);
    const auto page = static_cast<int64_t>(random() % 3), run = static_cast<int64_t>(random() % 4);
    const auto byte = static_cast<int64_t>(random() % 5000);
    reinterpret_cast<unsigned char*>(world.slot(page))[run * 5000 + byte] ^=
        static_cast<unsigned char>(1u << (random() % 8));
    const BatchResult result = world.move(*emulated_device(), true);
    for (int64_t p = 0; p < 3; ++p) {
      CHECK(result.bad_run[static_cast<size_t>(p)] == (p == page ? run : kNoBadRun));
    }
  }
}

TEST_CASE("emulated, control: a transform kernel that is broken does not pass for a right one") {
  TransformWorld world(2, 9000, 0, 3);
  {
    const emulated::WithFaults broken({.shuffles_give_nothing = true});
    CHECK(!stores_alike(world));
  }
  {
    const emulated::WithFaults broken({.blocks_left_out = 1});
    CHECK(!stores_alike(world));
  }
  CHECK(stores_alike(world));
}
