#include <cuda_runtime.h>

#include <cstring>

#include "cuda/copy_kernel.cuh"

namespace flexkv::cuda {
namespace {

std::string launch(const CopyJob& job, std::span<const std::byte> tables, int multiprocessors, void* stream) {
  const int blocks = blocks_for(item_count(job), kFullBlockThreads, multiprocessors);
  if (blocks == 0) return {};
  const auto grid = static_cast<unsigned>(blocks);
  const auto on = static_cast<cudaStream_t>(stream);
  if (tables.empty()) {
    copy_kernel<<<grid, kFullBlockThreads, 0, on>>>(job);
  } else {
    LaunchTables own;
    std::memcpy(own.bytes, tables.data(), tables.size());
    copy_kernel_with_tables<<<grid, kFullBlockThreads, 0, on>>>(job, own);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : std::string("copy kernel: ") + cudaGetErrorString(error);
}

std::string load() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(&copy_kernel), reinterpret_cast<const void*>(&copy_kernel_with_tables),
        reinterpret_cast<const void*>(&wait_kernel)}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return std::string("load kernel: ") + cudaGetErrorString(error);
  }
  return {};
}

std::string wait(const uint32_t* passed, uint32_t value, void* stream) {
  wait_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(passed, value);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : std::string("wait kernel: ") + cudaGetErrorString(error);
}

}  // namespace

CopyKernels copy_kernels() { return {&load, &launch, &wait}; }

}  // namespace flexkv::cuda
