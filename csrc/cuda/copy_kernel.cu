#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/copy_job.h"

namespace flexkv::cuda {
namespace {

// Unit: threads. Two such blocks fill the register file of a multiprocessor with kLoadsInFlight vectors a
// thread.
constexpr int kBlockThreads = 512;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kWarpsPerBlock = kBlockThreads / kWarpThreads;

__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor) copy_kernel(CopyJob job) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarpThreads;
  copy_share(job, warp, static_cast<int64_t>(gridDim.x) * kWarpsPerBlock,
             static_cast<int>(threadIdx.x % kWarpThreads));
}

std::string launch(const CopyJob& job, int multiprocessors, void* stream) {
  const int64_t needed = (item_count(job) + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (needed == 0) return {};
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  const auto blocks = static_cast<unsigned>(std::min(needed, most));
  copy_kernel<<<blocks, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(job);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : std::string("copy kernel: ") + cudaGetErrorString(error);
}

}  // namespace

KernelLauncher copy_kernel_launcher() { return &launch; }

}  // namespace flexkv::cuda
