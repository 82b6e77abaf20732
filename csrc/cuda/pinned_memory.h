// Host memory that all devices know, owned.
#pragma once
#include <cstddef>

#include "cuda/driver.h"

namespace flexkv::cuda {

class PinnedMemory {
 public:
  // Precondition, here and at the end: a device is current. Throws CapacityError.
  PinnedMemory(const Driver& driver, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* bytes() const { return static_cast<std::byte*>(memory_); }

 private:
  const Driver& driver_;
  void* memory_ = nullptr;
};

}  // namespace flexkv::cuda
