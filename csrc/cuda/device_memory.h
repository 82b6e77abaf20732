// Memory of a GPU, owned by an object. The object can also measure how long plain copies to and from the host
// take. `flexkv bench transfer` compares transfers with these times.
#pragma once
#include <memory>

#include "cuda/device.h"

namespace flexkv::cuda {

class DeviceMemory {
 public:
  // Allocates `bytes` of the device's memory. Throws CapacityError if the driver fails.
  DeviceMemory(std::shared_ptr<Device> device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uintptr_t address() const { return static_cast<uintptr_t>(address_); }
  size_t bytes() const { return bytes_; }
  int multiprocessors() const { return device_->multiprocessors(); }
  // Returns how many seconds `calls` copies of `call_bytes` to or from pinned host memory take until the last
  // copy has ended. Each copy is one driver call and uses the next `call_bytes` of this memory; after the end
  // of the memory, the next copy begins at the start again. All copies are enqueued on one new stream. Throws
  // ContractError if `call_bytes` is 0 or larger than the memory, and CapacityError if the driver fails.
  double time_copies(bool to_device, size_t call_bytes, int64_t calls) const;

 private:
  const std::shared_ptr<Device> device_;
  const size_t bytes_;
  DeviceAddress address_ = 0;
};

}  // namespace flexkv::cuda
