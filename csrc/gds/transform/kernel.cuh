// The kernel of the layout transform, which launcher.cu launches.
#pragma once
#include "base/kernel_grid.h"
#include "gds/transform/arithmetic.h"

namespace flexkv {
namespace {

// The atomic operations that end_leaf() needs. nvcc compiles end_leaf(), and therefore these functions, for
// the host, too. The host versions are never called.
struct GpuAtomics {
  __host__ __device__ static uint64_t add(uint64_t* value, uint64_t amount) {
#if defined(__CUDA_ARCH__) || defined(FLEXKV_EMULATED_CUDA)
    static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
    return atomicAdd(reinterpret_cast<unsigned long long*>(value), static_cast<unsigned long long>(amount));
#else
    return *value + amount;
#endif
  }
  __host__ __device__ static void min(int32_t* value, int32_t other) {
#if defined(__CUDA_ARCH__) || defined(FLEXKV_EMULATED_CUDA)
    atomicMin(value, other);
#else
    *value = other < *value ? other : *value;
#endif
  }
  __host__ __device__ static void fence() {
#if defined(__CUDA_ARCH__) || defined(FLEXKV_EMULATED_CUDA)
    __threadfence();
#endif
  }
};

__device__ inline void add_from(LaneSums& sums, int distance) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  sums.products += __shfl_down_sync(kAll, sums.products, distance);
  sums.words += __shfl_down_sync(kAll, sums.words, distance);
}

// In lane 0, returns the leaf's folded value; the results in other lanes are meaningless.
// csrc/testing/transform_lanes.cpp computes the same value with an array.
__device__ inline uint64_t reduce_and_fold(LaneLeafSums sums, int lane) {
  for (int distance = kTransformLanes / 2; distance >= kSumGroups; distance /= 2) {
    add_from(sums.even, distance);
    add_from(sums.odd, distance);
  }
  uint64_t folded = lane < kSumGroups ? fold_sums(sums, lane) : 0;
  for (int distance = kSumGroups / 2; distance > 0; distance /= 2) {
    folded += __shfl_down_sync(0xFFFFFFFFu, folded, distance);
  }
  return folded;
}

template <bool kDigest, bool kCopy>
__global__ void __launch_bounds__(kFullBlockThreads, 1) transform_kernel(const TransformBatch batch) {
  const int lane = static_cast<int>(threadIdx.x) % kTransformLanes;
  const int block_warps = static_cast<int>(blockDim.x) / kTransformLanes;
  const int warp =
      static_cast<int>(blockIdx.x) * block_warps + static_cast<int>(threadIdx.x) / kTransformLanes;
  LeafWalk walk(batch, warp, static_cast<int>(gridDim.x) * block_warps);
  for (; !walk.ended(); walk.advance()) {
    const TransformLeaf leaf = batch.leaves[walk.leaf()];
    const LaneLeafSums sums =
        move_leaf_lane<kDigest, kCopy>(leaf_ends(batch, walk.page(), leaf), leaf.bytes, lane);
    if constexpr (kDigest) {
      const uint64_t folded = reduce_and_fold(sums, lane);
      if (lane == 0) end_leaf<GpuAtomics>(batch, walk.page(), leaf, folded);
    }
  }
}

}  // namespace
}  // namespace flexkv
