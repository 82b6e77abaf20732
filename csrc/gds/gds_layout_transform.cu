#include "gds/gds_layout_transform.cuh"

namespace flexkv {
namespace {

struct GpuAtomics {
  __host__ __device__ static uint64_t add(uint64_t* value, uint64_t amount) {
#if defined(__CUDA_ARCH__)
    static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
    return atomicAdd(reinterpret_cast<unsigned long long*>(value), static_cast<unsigned long long>(amount));
#else
    return *value + amount;
#endif
  }
  __host__ __device__ static void min(int32_t* value, int32_t other) {
#if defined(__CUDA_ARCH__)
    atomicMin(value, other);
#else
    *value = other < *value ? other : *value;
#endif
  }
  __host__ __device__ static void fence() {
#if defined(__CUDA_ARCH__)
    __threadfence();
#endif
  }
};

__device__ void add_from(LaneSums& sums, int distance) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  sums.products += __shfl_down_sync(kAll, sums.products, distance);
  sums.words += __shfl_down_sync(kAll, sums.words, distance);
}

// Lane 0 gets the leaf's folded value: what testing/transform_lanes.cpp does with an array.
__device__ uint64_t reduce_and_fold(LaneLeafSums sums, int lane) {
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
__global__ void __launch_bounds__(kTransformThreads) transform_kernel(const TransformBatch batch) {
  const int lane = static_cast<int>(threadIdx.x) % kTransformLanes;
  const int warps = static_cast<int>(gridDim.x) * (kTransformThreads / kTransformLanes);
  const int first = static_cast<int>(blockIdx.x) * (kTransformThreads / kTransformLanes) +
                    static_cast<int>(threadIdx.x) / kTransformLanes;
  // Warps walk the leaves of all pages in turns; steps over page ends instead of divisions.
  int64_t leaf_number = first;
  int32_t page = 0;
  while (true) {
    while (leaf_number >= batch.num_leaves) {
      leaf_number -= batch.num_leaves;
      page += 1;
    }
    if (page >= batch.num_pages) return;
    const TransformLeaf leaf = batch.leaves[leaf_number];
    const LaneLeafSums sums = move_leaf_lane<kDigest, kCopy>(leaf_ends(batch, page, leaf), leaf.bytes, lane);
    if (kDigest) {
      const uint64_t folded = reduce_and_fold(sums, lane);
      if (lane == 0) end_leaf<GpuAtomics>(batch, page, leaf, folded);
    }
    leaf_number += warps;
  }
}

}  // namespace

cudaError_t launch_layout_transform(const TransformBatch& batch, int blocks, cudaStream_t stream) {
  if (in_pool(batch.mode)) {
    transform_kernel<true, false><<<blocks, kTransformThreads, 0, stream>>>(batch);
  } else if (has_digests(batch.mode)) {
    transform_kernel<true, true><<<blocks, kTransformThreads, 0, stream>>>(batch);
  } else {
    transform_kernel<false, true><<<blocks, kTransformThreads, 0, stream>>>(batch);
  }
  return cudaGetLastError();
}

}  // namespace flexkv
