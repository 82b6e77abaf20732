#include "gds/transform/cuda_workspace.h"

#include <cstdint>
#include <utility>

namespace flexkv {

std::string GpuMemory::allocate(void** memory, size_t bytes) const {
  cuda::DeviceAddress address = 0;
  std::string error = driver->failure(driver->mem_alloc(&address, bytes), "cuMemAlloc");
  if (error.empty()) *memory = reinterpret_cast<void*>(address);
  return error;
}

// This function and PinnedMemory::release() ignore errors: when the process exits, the driver may already be
// unloaded, and the memory is then already freed.
void GpuMemory::release(void* memory) const { driver->mem_free(reinterpret_cast<uintptr_t>(memory)); }

std::string PinnedMemory::allocate(void** memory, size_t bytes) const {
  return driver->failure(driver->host_alloc(memory, bytes, cuda::kHostAllocPortable), "cuMemHostAlloc");
}

void PinnedMemory::release(void* memory) const { driver->host_free(memory); }

CudaBatchBuffers::CudaBatchBuffers(const cuda::Driver& driver)
    : host_pages({&driver}),
      host_bad_run({&driver}),
      pages({&driver}),
      progress({&driver}),
      bad_run({&driver}) {}

CudaWorkspace::CudaWorkspace(const std::shared_ptr<cuda::Device>& device)
    : stream(device),
      runs({&device->driver()}),
      leaves({&device->driver()}),
      batches{CudaBatchBuffers(device->driver()), CudaBatchBuffers(device->driver())} {}

WorkspacePool::~WorkspacePool() {
  const cuda::QuietCurrent here(*device_);
  free_.clear();
}

std::unique_ptr<CudaWorkspace> WorkspacePool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      auto workspace = std::move(free_.back());
      free_.pop_back();
      return workspace;
    }
  }
  return std::make_unique<CudaWorkspace>(device_);
}

void WorkspacePool::put(std::unique_ptr<CudaWorkspace> workspace) {
  if (!workspace->error.empty()) return;
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(workspace));
}

}  // namespace flexkv
