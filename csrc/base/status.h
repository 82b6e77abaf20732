// How an operation on pages ended, and why its pages failed. The comment on each code says what the caller
// may do next.
#pragma once
#include <cstdint>

namespace flexkv {

enum class Status : int32_t {
  kOk = 0,         // every byte moved (and was verified, if a digest was requested)
  kFailed = 1,     // the named pages are unusable; the others are good
  kCancelled = 2,  // never issued: no byte moved, and only the pins must be released
  kSkipped = 3,    // a predecessor failed, so this op (or page) was not issued
  kLaneDown = 4,   // the lane was taken out of service; try another tier, not this one
};

// Whether a page's stored copy is worth reading again.
enum class FailureCause : uint8_t {
  kUnknown = 0,      // not reported: treated as kContent, which forgets the copy
  kContent = 1,      // the stored bytes are not the requested page
  kSource = 2,       // the disk refused the read or cut it short
  kTransport = 3,    // memory, a device, its driver or the lane: any page would have failed
  kNotExecuted = 4,  // cancelled, late or not begun
};

}  // namespace flexkv
