// The stream, events and small buffers of one transfer's transforms on a GPU, kept for the next transfer.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <string>
#include <vector>

#include "gds/transform_device.h"

namespace flexkv {

// "what: the runtime's words"; empty for success. Clears the runtime's copy of the error, which would be
// blamed on the next launch.
std::string cuda_error(cudaError_t code, const char* what);

// Makes a GPU this thread's current one for a scope: the thread may be the engine's.
class CurrentGpu {
 public:
  explicit CurrentGpu(int number);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;
  const std::string& error() const { return error_; }

 private:
  int before_ = 0;
  bool restore_ = false;
  std::string error_;
};

// Memory of the GPU, or pinned host memory, that only ever grows. What it outgrows is freed with it: a free
// waits for the whole device, other transfers and the engine's work included.
class GrowingBuffer {
 public:
  explicit GrowingBuffer(bool pinned) : pinned_(pinned) {}
  ~GrowingBuffer();
  GrowingBuffer(const GrowingBuffer&) = delete;
  GrowingBuffer& operator=(const GrowingBuffer&) = delete;
  // Empty, or why there is no memory. What it held is lost.
  std::string reserve(size_t bytes);
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  bool pinned_;
  std::vector<void*> allocated_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

struct CudaBatchBuffers {
  GrowingBuffer host_pages{true}, host_bad_run{true};
  GrowingBuffer pages{false}, progress{false}, bad_run{false};
  cudaEvent_t ended = nullptr;
};

// Made and destroyed with its GPU current.
struct CudaWorkspace {
  CudaWorkspace();
  ~CudaWorkspace();
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;

  cudaStream_t stream = nullptr;
  cudaEvent_t engine_fence = nullptr;
  GrowingBuffer runs{false}, leaves{false};
  std::array<CudaBatchBuffers, kBatchesInFlight> batches;
  std::string error;  // why it cannot be used; empty if it can
};

}  // namespace flexkv
