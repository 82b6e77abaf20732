// How an operation on pages ended. One line a code says what the caller may do next.
#pragma once
#include <cstdint>

namespace flexkv {

enum class Status : int32_t {
  kOk = 0,         // every byte moved (and verified where a digest was asked for)
  kFailed = 1,     // the named pages are unusable; the others are good
  kCancelled = 2,  // never issued: no byte moved, nothing to release but the leases
  kSkipped = 3,    // a predecessor failed, so this op (or page) was not issued
  kLaneDown = 4,   // the lane was taken out of service; try another tier, not this one
};

}  // namespace flexkv
