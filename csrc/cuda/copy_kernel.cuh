// The device code of the copy kernel and of the kernel that waits for a stage. copy_kernel.cu launches these
// kernels.
#pragma once
#include "base/kernel_grid.h"
#include "cuda/copy_job.h"

namespace flexkv::cuda {

struct LaunchTables {
  alignas(16) unsigned char bytes[kTablesInLaunch];
};

namespace {

// Counts that this warp has passed the stage. The last warp to pass it also counts the stage as passed.
// Because of the fences, the bytes of all warps are visible before the count for which a stream waits.
__device__ inline void pass_stage(const CopyJob& job, int32_t stage, int32_t warps) {
  if (job.words.passed == nullptr) return;
  __syncwarp();
  if (threadIdx.x % kWarpThreads != 0) return;
  __threadfence();
  if (atomicAdd(job.words.warps + stage, 1u) + 1 != static_cast<unsigned>(warps)) return;
  atomicExch(job.words.warps + stage, 0u);
  __threadfence();
  atomicAdd(job.words.passed, 1u);
}

__device__ inline void copy_own_share(const CopyJob& job) {
  const auto block_warps = static_cast<int32_t>(blockDim.x / kWarpThreads);
  const auto warp =
      static_cast<int32_t>(blockIdx.x) * block_warps + static_cast<int32_t>(threadIdx.x / kWarpThreads);
  const int32_t warps = static_cast<int32_t>(gridDim.x) * block_warps;
  copy_share(job, warp, warps, static_cast<int>(threadIdx.x % kWarpThreads),
             [&](int32_t stage) { pass_stage(job, stage, warps); });
}

__global__ void __launch_bounds__(kFullBlockThreads, 1) copy_kernel(CopyJob job) { copy_own_share(job); }

// Runs until `*passed` has reached `value`. Alternatively, the stream itself could wait for the word;
// docs/gpu.md has measurements of this.
__global__ void __launch_bounds__(1, 1) wait_kernel(const uint32_t* passed, uint32_t value) {
  while (static_cast<int32_t>(read_word(passed) - value) < 0) __nanosleep(200);
  __threadfence();
}

__global__ void __launch_bounds__(kFullBlockThreads, 1)
    copy_kernel_with_tables(CopyJob job, const __grid_constant__ LaunchTables tables) {
  copy_own_share(with_tables(job, tables.bytes));
}

}  // namespace
}  // namespace flexkv::cuda
