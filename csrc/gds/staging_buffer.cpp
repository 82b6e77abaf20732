#include "gds/staging_buffer.h"

#include <algorithm>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {

StagingBuffer::StagingBuffer(std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io,
                             int64_t bytes)
    : device_(std::move(device)), io_(std::move(io)), bytes_(bytes) {
  base_ = static_cast<std::byte*>(device_->allocate(bytes_));
  // The device must be current, because cuFile registers memory with the current context, and this may be a
  // thread of the inference engine with a different context.
  not_registered_ = device_->while_current([&] { return io_->add_memory(base_, bytes_); });
}

StagingBuffer::StagingBuffer(void* memory, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const int64_t skipped = (kIoAlignBytes - static_cast<int64_t>(address % kIoAlignBytes)) % kIoAlignBytes;
  if (memory == nullptr || bytes <= skipped) {
    throw CapacityError("a staging buffer of " + std::to_string(bytes) + " bytes at address " +
                        std::to_string(address) + " holds no 4 KiB boundary");
  }
  base_ = static_cast<std::byte*>(memory) + skipped;
  bytes_ = bytes - skipped;
}

StagingBuffer::~StagingBuffer() {
  if (device_ == nullptr) return;
  // If the device cannot be made current, its context no longer exists, and its memory was freed with the
  // context.
  device_->while_current([&] {
    io_->remove_memory(base_);
    return std::string();
  });
  device_->release(base_);
}

int32_t StagingBuffer::slots_of(int64_t slot_bytes) const {
  const int64_t slots = bytes_ / slot_bytes;
  if (slots < 1) {
    throw CapacityError("a staging buffer of " + std::to_string(bytes_) +
                        " bytes (from its first 4 KiB boundary on) is too small for one block of " +
                        std::to_string(slot_bytes) + " bytes");
  }
  return static_cast<int32_t>(std::min<int64_t>(slots, INT32_MAX));
}

}  // namespace flexkv
