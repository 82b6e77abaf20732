#include "cuda/pinned_memory.h"

#include <utility>

#include "base/error.h"

namespace flexkv::cuda {

PinnedMemory::PinnedMemory(std::shared_ptr<Device> device, size_t bytes) : device_(std::move(device)) {
  const Current here(*device_);
  const Driver& driver = device_->driver();
  const Code code = driver.host_alloc(&memory_, bytes, kHostAllocPortable | kHostAllocDeviceMap);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuMemHostAlloc"));
}

PinnedMemory::~PinnedMemory() {
  const QuietCurrent here(*device_);
  device_->driver().host_free(memory_);
}

}  // namespace flexkv::cuda
