#include <cuda_runtime.h>

#include <algorithm>

#include "gds/transform/kernel.cuh"
#include "gds/transform/launcher.h"

namespace flexkv {
namespace {

constexpr int kTransformThreads = kFullBlockThreads;
// How many thread blocks fit on a multiprocessor. With 64 registers per thread, one thread block uses all
// registers of the multiprocessor.
constexpr int kTransformBlocksPerMultiprocessor = 1;

cudaError_t enqueue(const TransformBatch& batch, int most_blocks, cudaStream_t stream) {
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

std::string launch(const TransformBatch& batch, TransformGrid grid, int multiprocessors, void* stream) {
  const int blocks = grid == TransformGrid::kWholeDevice ? multiprocessors * kTransformBlocksPerMultiprocessor
                                                         : std::min(kTransformBlocks, multiprocessors);
  const cudaError_t error = enqueue(batch, blocks, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? std::string()
                              : std::string("the layout transform's launch: ") + cudaGetErrorString(error);
}

}  // namespace

LayoutLauncher layout_launcher() { return &launch; }

}  // namespace flexkv
