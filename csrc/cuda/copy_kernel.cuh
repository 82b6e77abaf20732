// The copy kernel's code; copy_kernel.cu launches it.
#pragma once
#include "base/kernel_grid.h"
#include "cuda/copy_job.h"

namespace flexkv::cuda {

struct LaunchTables {
  alignas(16) unsigned char bytes[kTablesInLaunch];
};

namespace {

__device__ inline void copy_own_share(const CopyJob& job) {
  const int64_t block_warps = blockDim.x / kWarpThreads;
  const int64_t warp = blockIdx.x * block_warps + threadIdx.x / kWarpThreads;
  copy_share(job, warp, gridDim.x * block_warps, static_cast<int>(threadIdx.x % kWarpThreads));
}

__global__ void __launch_bounds__(kFullBlockThreads, 1) copy_kernel(CopyJob job) { copy_own_share(job); }

__global__ void __launch_bounds__(kFullBlockThreads, 1)
    copy_kernel_with_tables(CopyJob job, const __grid_constant__ LaunchTables tables) {
  copy_own_share(with_tables(job, tables.bytes));
}

}  // namespace
}  // namespace flexkv::cuda
