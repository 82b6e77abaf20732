#include "gds/cuda_workspace.cuh"

namespace flexkv {

std::string cuda_error(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  return std::string(what) + ": " + cudaGetErrorString(code);
}

CurrentGpu::CurrentGpu(int number) {
  error_ = cuda_error(cudaGetDevice(&before_), "cudaGetDevice");
  if (!error_.empty() || before_ == number) return;
  error_ = cuda_error(cudaSetDevice(number), "cudaSetDevice");
  restore_ = error_.empty();
}

CurrentGpu::~CurrentGpu() {
  // At exit the driver may be gone already; there is nobody to tell.
  if (restore_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
}

std::string DeviceMemory::allocate(void** memory, size_t bytes) {
  return cuda_error(cudaMalloc(memory, bytes), "cudaMalloc");
}

void DeviceMemory::release(void* memory) {
  if (cudaFree(memory) != cudaSuccess) cudaGetLastError();
}

std::string PinnedMemory::allocate(void** memory, size_t bytes) {
  return cuda_error(cudaMallocHost(memory, bytes), "cudaMallocHost");
}

void PinnedMemory::release(void* memory) {
  if (cudaFreeHost(memory) != cudaSuccess) cudaGetLastError();
}

CudaWorkspace::CudaWorkspace() {
  constexpr unsigned kWaitAsleep = cudaEventBlockingSync | cudaEventDisableTiming;
  error = cuda_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  if (error.empty()) {
    error = cuda_error(cudaEventCreateWithFlags(&engine_fence, cudaEventDisableTiming), "cudaEventCreate");
  }
  for (CudaBatchBuffers& batch : batches) {
    if (error.empty())
      error = cuda_error(cudaEventCreateWithFlags(&batch.ended, kWaitAsleep), "cudaEventCreate");
  }
}

CudaWorkspace::~CudaWorkspace() {
  for (CudaBatchBuffers& batch : batches) {
    if (batch.ended != nullptr && cudaEventDestroy(batch.ended) != cudaSuccess) cudaGetLastError();
  }
  if (engine_fence != nullptr && cudaEventDestroy(engine_fence) != cudaSuccess) cudaGetLastError();
  if (stream != nullptr && cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
}

}  // namespace flexkv
