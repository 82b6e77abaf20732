#include "testing/layout_lanes.h"

#include <algorithm>
#include <array>

#include "layout/lane_work.h"

namespace flexkv {
namespace {

// Does the reduction that a warp does with shuffles: adds the sums of pairs of lanes until one sum per digest
// lane is left. In each step, the distance between the two lanes of a pair is halved. Then folds these sums.
uint64_t reduce_and_fold(std::array<LaneSums, kWarpLanes>& sums) {
  for (int distance = kWarpLanes / 2; distance >= kDigestLanes; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
      sums[static_cast<size_t>(lane)].add(sums[static_cast<size_t>(lane + distance)]);
    }
  }
  uint64_t folded = 0;
  for (int lane = 0; lane < kDigestLanes; ++lane) folded += sums[static_cast<size_t>(lane)].folded(lane);
  return folded;
}

}  // namespace

void gather_lane_by_lane(std::span<const Segment> segments, int64_t block, unsigned char* stripe) {
  for (const Segment& s : segments) {
    const auto* run = reinterpret_cast<const unsigned char*>(run_address(s, block));
    for (int lane = kWarpLanes - 1; lane >= 0; --lane) {
      copy_lane(stripe + s.page_offset, run, s.run_bytes, lane, kWarpLanes);
    }
  }
}

void scatter_lane_by_lane(std::span<const Segment> segments, int64_t block, const unsigned char* stripe) {
  for (const Segment& s : segments) {
    auto* run = reinterpret_cast<unsigned char*>(run_address(s, block));
    for (int lane = kWarpLanes - 1; lane >= 0; --lane) {
      copy_lane(run, stripe + s.page_offset, s.run_bytes, lane, kWarpLanes);
    }
  }
}

uint64_t run_digest_lane_by_lane(const unsigned char* data, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t leaf = (bytes + kLeafBytes - 1) / kLeafBytes - 1; leaf >= 0; --leaf) {
    const int64_t leaf_bytes = std::min(kLeafBytes, bytes - leaf * kLeafBytes);
    std::array<LaneSums, kWarpLanes> sums;
    for (int lane = kWarpLanes - 1; lane >= 0; --lane) {
      sums[static_cast<size_t>(lane)] = leaf_lane(data + leaf * kLeafBytes, leaf_bytes, lane, kWarpLanes);
    }
    sum += leaf_term(reduce_and_fold(sums), static_cast<uint64_t>(leaf), static_cast<uint64_t>(leaf_bytes));
  }
  return finish_run(sum, static_cast<uint64_t>(bytes));
}

}  // namespace flexkv
