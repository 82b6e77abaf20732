// The stream, events and small buffers that one transfer's transforms need on a GPU. They are kept for later
// transfers, too.
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

// The memory type of a GrowingBuffer in the current GPU's memory.
struct GpuMemory {
  const cuda::Driver* driver;
  std::string allocate(void** memory, size_t bytes) const;
  void release(void* memory) const;
};
// The memory type of a GrowingBuffer in pinned host memory, which the GPU can access.
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
  // Throws CapacityError if no stream can be made.
  explicit CudaWorkspace(const std::shared_ptr<cuda::Device>& device);
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;

  const cuda::Stream stream;
  GrowingBuffer<GpuMemory> runs, leaves;
  std::array<CudaBatchBuffers, kBatchesInFlight> batches;
  std::string error;  // why the workspace cannot be used; empty if it can
};

// Keeps workspaces between transfers. This object may outlive the TransformDevice that made it, as long as a
// transformer uses it.
class WorkspacePool {
 public:
  explicit WorkspacePool(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;
  const std::shared_ptr<cuda::Device>& device() const { return device_; }
  // Returns a workspace that put() has kept, or a new one. Precondition: the GPU is current. Throws
  // CapacityError if no workspace can be made.
  std::unique_ptr<CudaWorkspace> take();
  // Keeps a workspace for a later take(), or destroys it if it has an error. Precondition: the work on the
  // workspace's stream has finished.
  void put(std::unique_ptr<CudaWorkspace> workspace);

 private:
  const std::shared_ptr<cuda::Device> device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaWorkspace>> free_;
};

}  // namespace flexkv
