// The stream, events and small buffers of one transfer's transforms on a GPU, kept for the next transfer.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <string>

#include "gds/growing_buffer.h"
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

// Of the current GPU.
struct DeviceMemory {
  static std::string allocate(void** memory, size_t bytes);
  static void release(void* memory);
};
// Of the host, within the GPU's reach.
struct PinnedMemory {
  static std::string allocate(void** memory, size_t bytes);
  static void release(void* memory);
};

struct CudaBatchBuffers {
  GrowingBuffer<PinnedMemory> host_pages, host_bad_run;
  GrowingBuffer<DeviceMemory> pages, progress, bad_run;
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
  GrowingBuffer<DeviceMemory> runs, leaves;
  std::array<CudaBatchBuffers, kBatchesInFlight> batches;
  std::string error;  // why it cannot be used; empty if it can
};

}  // namespace flexkv
