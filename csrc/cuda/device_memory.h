// Owned memory of a GPU, and the speed of bare copies to and from it, which is the baseline of `flexkv bench
// transfer`.
#pragma once
#include <memory>

#include "cuda/device.h"

namespace flexkv::cuda {

class DeviceMemory {
 public:
  // Throws CapacityError.
  DeviceMemory(std::shared_ptr<Device> device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uintptr_t address() const { return static_cast<uintptr_t>(address_); }
  size_t bytes() const { return bytes_; }
  int multiprocessors() const { return device_->multiprocessors(); }
  // The seconds that `calls` copies of `call_bytes` to or from pinned host memory take, with one driver call
  // each, on a separate stream, until the last has ended. The calls walk through the memory. Throws
  // CapacityError, or ContractError when one call is larger than the memory.
  double time_copies(bool to_device, size_t call_bytes, int64_t calls) const;

 private:
  const std::shared_ptr<Device> device_;
  const size_t bytes_;
  DeviceAddress address_ = 0;
};

}  // namespace flexkv::cuda
