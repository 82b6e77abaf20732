#include "gds/gds_layout_transform.cuh"
#include "gds/transform_kernel.cuh"

namespace flexkv {

cudaError_t launch_layout_transform(const TransformBatch& batch, int most_blocks, cudaStream_t stream) {
  const int64_t leaves = static_cast<int64_t>(batch.num_pages) * batch.num_leaves;
  const int blocks = blocks_for(leaves, kTransformThreads, most_blocks);
  if (blocks == 0) return cudaSuccess;
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
