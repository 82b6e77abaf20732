#include <cuda_runtime.h>

#include "cuda/copy_kernel.cuh"

namespace flexkv::cuda {
namespace {

std::string launch(const CopyJob& job, int multiprocessors, void* stream) {
  const int blocks = blocks_for(item_count(job), kFullBlockThreads, multiprocessors);
  if (blocks == 0) return {};
  copy_kernel<<<static_cast<unsigned>(blocks), kFullBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      job);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : std::string("copy kernel: ") + cudaGetErrorString(error);
}

}  // namespace

KernelLauncher copy_kernel_launcher() { return &launch; }

}  // namespace flexkv::cuda
