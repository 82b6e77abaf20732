// Host memory that is pinned for all devices. The object allocates and frees it.
#pragma once
#include <cstddef>
#include <memory>

#include "cuda/device.h"

namespace flexkv::cuda {

class PinnedMemory {
 public:
  // Allocates `bytes` of pinned memory. Throws CapacityError if the driver fails.
  PinnedMemory(std::shared_ptr<Device> device, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* bytes() const { return static_cast<std::byte*>(memory_); }

 private:
  const std::shared_ptr<Device> device_;
  void* memory_ = nullptr;
};

}  // namespace flexkv::cuda
