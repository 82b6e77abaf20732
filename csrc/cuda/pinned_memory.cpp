#include "cuda/pinned_memory.h"

#include "base/error.h"

namespace flexkv::cuda {

PinnedMemory::PinnedMemory(const Driver& driver, size_t bytes) : driver_(driver) {
  const Code code = driver_.host_alloc(&memory_, bytes, kHostAllocPortable | kHostAllocDeviceMap);
  if (code != kSuccess) throw CapacityError(driver_.error_text(code, "cuMemHostAlloc"));
}

PinnedMemory::~PinnedMemory() { driver_.host_free(memory_); }

}  // namespace flexkv::cuda
