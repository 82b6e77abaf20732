// The stream, events and small buffers of one transfer's transforms on a GPU, kept for the next transfer.
#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/event.h"
#include "gds/growing_buffer.h"
#include "gds/transform_device.h"

namespace flexkv {

// Of the current GPU.
struct GpuMemory {
  const cuda::Driver* driver;
  std::string allocate(void** memory, size_t bytes) const;
  void release(void* memory) const;
};
// Of the host, within the GPU's reach.
struct PinnedMemory {
  const cuda::Driver* driver;
  std::string allocate(void** memory, size_t bytes) const;
  void release(void* memory) const;
};

struct CudaBatchBuffers {
  explicit CudaBatchBuffers(const cuda::Driver& driver);
  GrowingBuffer<PinnedMemory> host_pages, host_bad_run;
  GrowingBuffer<GpuMemory> pages, progress, bad_run;
  std::unique_ptr<cuda::Event> ended;
};

// Made and destroyed with its GPU current.
struct CudaWorkspace {
  // Throws CapacityError.
  explicit CudaWorkspace(const std::shared_ptr<cuda::Device>& device);
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;

  const cuda::Stream stream;
  GrowingBuffer<GpuMemory> runs, leaves;
  std::array<CudaBatchBuffers, kBatchesInFlight> batches;
  std::string error;  // why it cannot be used; empty if it can
};

// Workspaces between transfers. Outlives the device object while a transformer uses one.
class WorkspacePool {
 public:
  explicit WorkspacePool(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;
  const std::shared_ptr<cuda::Device>& device() const { return device_; }
  // With the GPU current. Throws CapacityError.
  std::unique_ptr<CudaWorkspace> take();
  // Only one whose work has ended.
  void put(std::unique_ptr<CudaWorkspace> workspace);

 private:
  const std::shared_ptr<cuda::Device> device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaWorkspace>> free_;
};

}  // namespace flexkv
