// Why a page failed, and so whether its stored copy is worth reading again.
#pragma once
#include <cstdint>

namespace flexkv {

enum class FailureCause : uint8_t {
  kUnknown = 0,      // not reported: treated as kContent, which forgets the copy
  kContent = 1,      // the stored bytes are not the page that was asked for
  kSource = 2,       // the disk refused the read or cut it short
  kTransport = 3,    // memory, a device, its driver or the lane: any page would have failed
  kNotExecuted = 4,  // cancelled, late or not begun
};

}  // namespace flexkv
