// Runs the functions of the layout transform lane by lane on the CPU, and compares the results with those of
// the vectorised code and of plain copies.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "gds/raw/raw_file.h"
#include "gds/transform/device.h"
#include "gds/transform/tables.h"
#include "storage/striping.h"
#include "testing/transform_lanes.h"
#include "transform_world.h"

using namespace flexkv;

TEST_CASE("lanes and the vectorised path move and digest the same bytes, whatever the size and alignment") {
  for (const int64_t run : {1, 3, 4, 8, 15, 16, 17, 31, 100, 1024, 4095, 4096, 4097, 4104, 9000, 18432}) {
    for (const int64_t skew : {0, 1, 4, 8, 16}) {
      CAPTURE(run);
      CAPTURE(skew);
      TransformWorld world(3, run, skew, 4);
      const ByteVector pool = world.pool;
      world.move(*host_transform_device(), false);
      const ByteVector fast = world.slots;
      put(world.slots, random_bytes(world.slots.size(), 2));
      world.move(*lane_transform_device(), false);
      CHECK(world.slots == fast);
      CHECK(world.pool == pool);
      for (const Segment& segment : world.map->runs()) {
        const auto* in_slot = reinterpret_cast<const unsigned char*>(world.slot(1)) + segment.page_offset;
        CHECK(std::memcmp(in_slot, reinterpret_cast<const void*>(run_address(segment, 2)),
                          static_cast<size_t>(run)) == 0);
        uint64_t digest = 0;
        std::memcpy(
            &digest,
            reinterpret_cast<const unsigned char*>(world.slot(1)) + world.digest_offset + 8 * segment.layer,
            8);
        CHECK(digest == run_digest_scalar(in_slot, static_cast<size_t>(run)));
      }

      for (const auto& device : {host_transform_device(), lane_transform_device()}) {
        put(world.pool, random_bytes(pool.size(), 3));
        const ByteVector other = world.pool;
        const BatchResult result = world.move(*device, true);
        CHECK(result.bad_run == std::vector<int32_t>(4, kNoBadRun));
        // The runs have their initial bytes again, and every byte between runs is unchanged.
        ByteVector expected = other;
        for (const Segment& segment : world.map->runs()) {
          for (int64_t block = 0; block < 4; ++block) {
            const auto at = run_address(segment, block) - reinterpret_cast<uintptr_t>(world.pool.data());
            std::memcpy(expected.data() + at, pool.data() + at, static_cast<size_t>(run));
          }
        }
        CHECK(world.pool == expected);
      }
    }
  }
}

TEST_CASE("a damaged byte anywhere in a page is found, by both paths, and names its run") {
  TransformWorld world(4, 5000, 0, 3);
  world.move(*host_transform_device(), false);
  const ByteVector good = world.slots;
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    put(world.slots, good);
    const auto page = static_cast<int64_t>(random() % 3), run = static_cast<int64_t>(random() % 4);
    const auto byte = static_cast<int64_t>(random() % 5000);
    reinterpret_cast<unsigned char*>(world.slot(page))[run * 5000 + byte] ^=
        static_cast<unsigned char>(1u << (random() % 8));
    for (const auto& device : {host_transform_device(), lane_transform_device()}) {
      const BatchResult result = world.move(*device, true);
      for (int64_t p = 0; p < 3; ++p) {
        CHECK(result.bad_run[static_cast<size_t>(p)] == (p == page ? run : kNoBadRun));
      }
    }
  }
}

TEST_CASE("a functor that loses a leaf's last bytes is found by the comparison with plain copies") {
  TransformWorld world(2, 4100, 0, 2);
  TransformTables tables(*world.map, false);
  for (TransformLeaf& leaf : tables.leaves) leaf.bytes = leaf.bytes / 16 * 16;  // control: the tails are lost
  std::vector<RunProgress> progress(4);
  std::vector<int32_t> bad(2, kNoBadRun);
  TransformBatch batch = host_batch(tables);
  const auto pages = world.pages();
  batch.pages = pages.data();
  batch.num_pages = 2;
  batch.progress = progress.data();
  batch.bad_run = bad.data();
  const ByteVector before = world.slots;
  transform_lane_by_lane(batch);
  const auto* last = reinterpret_cast<const unsigned char*>(world.slot(0)) + 4096;
  CHECK(std::memcmp(last, reinterpret_cast<const void*>(run_address(world.map->runs()[0], 1) + 4096), 4) !=
        0);
}

TEST_CASE("the warps of a launch walk every leaf of every page once, however many they are") {
  for (const int32_t leaves : {1, 2, 5, 32, 100}) {
    for (const int32_t pages : {1, 3, 64}) {
      for (const int32_t warps : {1, 7, 32, 256, 4224}) {
        TransformBatch batch;
        batch.num_leaves = leaves;
        batch.num_pages = pages;
        std::vector<int> taken(static_cast<size_t>(leaves * pages), 0);
        for (int32_t warp = 0; warp < warps; ++warp) {
          for (LeafWalk walk(batch, warp, warps); !walk.ended(); walk.advance()) {
            REQUIRE(walk.leaf() < leaves);
            taken[static_cast<size_t>(walk.page() * leaves + walk.leaf())] += 1;
          }
        }
        CHECK(taken == std::vector<int>(taken.size(), 1));
      }
    }
  }
}

TEST_CASE("a walk over the largest counts of leaves and pages does not run over") {
  TransformBatch batch;
  batch.num_leaves = INT32_MAX;
  batch.num_pages = INT32_MAX;
  LeafWalk walk(batch, INT32_MAX - 1, INT32_MAX);
  CHECK(walk.leaf() == INT32_MAX - 1);
  walk.advance();
  CHECK(walk.page() == 1);
  CHECK(walk.leaf() == INT32_MAX - 1);
  batch.num_leaves = 1;
  LeafWalk steps(batch, INT32_MAX - 1, INT32_MAX);
  CHECK(!steps.ended());
  steps.advance();
  CHECK(steps.ended());
}

TEST_CASE("the raw file rule gives every block a place of its own") {
  for (const int32_t devices : {1, 2, 3}) {
    for (const int64_t round_robin : {1, 2, 5}) {
      for (const int64_t per_file : {1, 3, 7}) {
        const RawFileRule rule(devices, round_robin, per_file);
        std::set<std::tuple<int32_t, int64_t, int64_t>> places;
        for (int64_t block = 0; block < 200; ++block) {
          const BlockPlace place = rule.place(block);
          CHECK(place.device == block / round_robin % devices);
          CHECK(place.block_in_file < per_file);
          CHECK(places.emplace(place.device, place.file, place.block_in_file).second);
        }
      }
    }
  }
  CHECK_THROWS_AS(RawFileRule(1, 1, 1).place(-1), BlockRangeError);
  CHECK_THROWS_AS(RawFileRule(0, 1, 1), GeometryError);
  CHECK_THROWS_AS(RawFileRule(1, 0, 1), GeometryError);
  CHECK_THROWS_AS(RawFileRule(1, 1, 0), GeometryError);
}

TEST_CASE("a place of the disk tier is where the rule of raw files has the block, one a turn") {
  constexpr int32_t kSlots = 50;
  for (const int32_t disks : {1, 2, 3, 7}) {
    const RawFileRule rule(disks, 1, kSlots);
    const RawFileRule other(disks, 2, kSlots);  // control: another rule gives different places
    int32_t same = 0;
    for (int32_t place = 0; place < disks * kSlots; ++place) {
      const StripedSlot at = striped_slot(place, disks);
      const BlockPlace expected = rule.place(place);
      CHECK(at.disk == expected.device);
      CHECK(at.slot == expected.block_in_file);
      CHECK(expected.file == 0);
      same += other.place(place).device == at.disk;
    }
    CHECK((same == disks * kSlots) == (disks == 1));
  }
}
