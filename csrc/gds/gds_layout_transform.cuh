// Launches the layout transform on a GPU.
#pragma once
#include <cuda_runtime.h>

#include "gds/layout_transform.h"

namespace flexkv {

inline constexpr int kTransformThreads = 1024;
// So many of these threads a multiprocessor holds (2,048 since compute capability 8.0, but for 8.6 and 8.9).
inline constexpr int kTransformBlocksPerMultiprocessor = 2;

// Enqueues one batch, whose arrays are in memory of the GPU. Returns the launch's own error.
cudaError_t launch_layout_transform(const TransformBatch& batch, int blocks, cudaStream_t stream);

}  // namespace flexkv
