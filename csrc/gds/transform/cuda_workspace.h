// The stream, events and small buffers that one transfer's transforms need on a GPU; kept for the next
// transfer.
#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/event.h"
#include "gds/transform/device.h"
#include "gds/transform/growing_buffer.h"

namespace flexkv {

// Memory of the current GPU.
struct GpuMemory {
  const cuda::Driver* driver;
  std::string allocate(void** memory, size_t bytes) const;
  void release(void* memory) const;
};
// Pinned host memory, which the GPU can reach.
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

// Precondition of the constructor and the destructor: the GPU is current.
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

// Keeps workspaces between transfers. Outlives its TransformDevice while a transformer uses it.
class WorkspacePool {
 public:
  explicit WorkspacePool(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;
  const std::shared_ptr<cuda::Device>& device() const { return device_; }
  // Precondition: the GPU is current. Throws CapacityError.
  std::unique_ptr<CudaWorkspace> take();
  // Precondition: the workspace's work has ended. Drops a workspace that has an error.
  void put(std::unique_ptr<CudaWorkspace> workspace);

 private:
  const std::shared_ptr<cuda::Device> device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaWorkspace>> free_;
};

}  // namespace flexkv
