// Memory for staging slots on one device: either memory that a manager owns, or memory that a caller provides
// for one transfer.
#pragma once
#include <cstdint>
#include <memory>

#include "gds/file_io.h"
#include "gds/transform/device.h"

namespace flexkv {

// A buffer of staging slots. I/O in flight has a reference to the buffer. So memory that the buffer owns
// outlives a transfer that no longer waits for the I/O.
class StagingBuffer {
 public:
  // Allocates memory on `device` and registers it with `io`. Throws CapacityError if the memory cannot be
  // allocated.
  StagingBuffer(std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io, int64_t bytes);
  // Uses `memory`, which belongs to the caller. Throws CapacityError if no byte of it is 4 KiB-aligned.
  StagingBuffer(void* memory, int64_t bytes);
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  // Whether the memory belongs to a caller.
  bool lent() const { return device_ == nullptr; }
  int64_t bytes() const { return bytes_; }
  std::byte* slot(int64_t number, int64_t slot_bytes) const { return base_ + number * slot_bytes; }
  // Returns how many slots fit into the memory. If not even one fits, throws CapacityError, whose text says
  // how much memory is needed.
  int32_t slots_of(int64_t slot_bytes) const;
  // Says why the memory is not registered with the I/O object; empty if it is registered or does not have to
  // be.
  const std::string& not_registered() const { return not_registered_; }

 private:
  std::shared_ptr<TransformDevice> device_;
  std::shared_ptr<FileIo> io_;
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  std::string not_registered_;
};

}  // namespace flexkv
