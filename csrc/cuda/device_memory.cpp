#include "cuda/device_memory.h"

#include <utility>

#include "base/error.h"
#include "cuda/event.h"
#include "cuda/pinned_memory.h"
#include "transfer/deadline.h"

namespace flexkv::cuda {

DeviceMemory::DeviceMemory(std::shared_ptr<Device> device, size_t bytes)
    : device_(std::move(device)), bytes_(bytes) {
  const Current here(*device_);
  const Code code = device_->driver().mem_alloc(&address_, bytes);
  if (code != kSuccess) throw CapacityError(device_->driver().error_text(code, "cuMemAlloc"));
}

DeviceMemory::~DeviceMemory() {
  const QuietCurrent here(*device_);
  device_->driver().mem_free(address_);
}

double DeviceMemory::time_copies(bool to_device, size_t call_bytes, int64_t calls) const {
  if (call_bytes == 0 || call_bytes > bytes_) {
    throw ContractError("time_copies: " + std::to_string(call_bytes) + " bytes a call: allowed is [1, " +
                        std::to_string(bytes_) + "]");
  }
  const Current here(*device_);
  const Driver& driver = device_->driver();
  const PinnedMemory host(device_, bytes_);
  Stream stream(device_);
  const size_t places = bytes_ / call_bytes;
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    const size_t at = static_cast<size_t>(i) % places * call_bytes;
    std::byte* near = host.bytes() + at;
    const Code code = to_device ? driver.copy_to_device(address_ + at, near, call_bytes, stream.handle())
                                : driver.copy_to_host(near, address_ + at, call_bytes, stream.handle());
    if (code != kSuccess) {
      Event(device_, stream.handle()).wait();
      throw CapacityError(driver.error_text(code, "copy"));
    }
  }
  if (const std::string error = Event(device_, stream.handle()).wait(); !error.empty())
    throw CapacityError(error);
  return seconds_since(start);
}

}  // namespace flexkv::cuda
