// The copy kernel's text; copy_kernel.cu launches it.
#pragma once
#include "base/kernel_grid.h"
#include "cuda/copy_job.h"

namespace flexkv::cuda {
namespace {

__global__ void __launch_bounds__(kFullBlockThreads, 1) copy_kernel(CopyJob job) {
  const int64_t block_warps = blockDim.x / kWarpThreads;
  const int64_t warp = blockIdx.x * block_warps + threadIdx.x / kWarpThreads;
  copy_share(job, warp, gridDim.x * block_warps, static_cast<int>(threadIdx.x % kWarpThreads));
}

}  // namespace
}  // namespace flexkv::cuda
