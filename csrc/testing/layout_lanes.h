// Functions that do the work of a GPU's warp on the CPU, one lane after another. Tests use them to show that
// the GPU's arithmetic copies the same bytes and computes the same digests as the CPU's arithmetic. They are
// also a reference for tests of the kernels.
#pragma once
#include <cstdint>
#include <span>

#include "layout/segment.h"

namespace flexkv {

inline constexpr int kWarpLanes = 32;

// Copies a block from the pool to `stripe`, lane by lane.
void gather_lane_by_lane(std::span<const Segment> segments, int64_t block, unsigned char* stripe);
// Copies `stripe` to a block in the pool, lane by lane.
void scatter_lane_by_lane(std::span<const Segment> segments, int64_t block, const unsigned char* stripe);
// Computes run_digest() as a GPU does, with one warp per leaf. Processes leaves and lanes from the last to
// the first, to show that the result does not depend on their order.
uint64_t run_digest_lane_by_lane(const unsigned char* data, int64_t bytes);

}  // namespace flexkv
