// Runs the per-thread work of a warp on the CPU, lane by lane in any order. This proves that the GPU's
// arithmetic moves and digests the same bytes as the host's, and is the reference for its kernels.
#pragma once
#include <cstdint>
#include <span>

#include "layout/segment.h"

namespace flexkv {

inline constexpr int kWarpLanes = 32;

// Pool -> stripe over `segments`, lane by lane.
void gather_lane_by_lane(std::span<const Segment> segments, int64_t block, unsigned char* stripe);
// Stripe -> pool.
void scatter_lane_by_lane(std::span<const Segment> segments, int64_t block, const unsigned char* stripe);
// Computes run_digest() as warps would: one warp per leaf, leaves from last to first, lanes from last to
// first.
uint64_t run_digest_lane_by_lane(const unsigned char* data, int64_t bytes);

}  // namespace flexkv
