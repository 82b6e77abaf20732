// Launches the layout transform on a GPU.
#pragma once
#include <cuda_runtime.h>

#include "base/kernel_grid.h"
#include "gds/layout_transform.h"

namespace flexkv {

inline constexpr int kTransformThreads = kFullBlockThreads;
// How many of these blocks a multiprocessor holds: at up to 64 registers per thread, one block fills its
// registers.
inline constexpr int kTransformBlocksPerMultiprocessor = 1;

// Enqueues one batch, whose arrays are in memory of the GPU, on at most `most_blocks` multiprocessors.
// Returns the launch's own error.
cudaError_t launch_layout_transform(const TransformBatch& batch, int most_blocks, cudaStream_t stream);

}  // namespace flexkv
