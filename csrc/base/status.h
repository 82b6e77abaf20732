// The outcome of an op on pages, and the causes of page failures.
#pragma once
#include <cstdint>

namespace flexkv {

enum class Status : int32_t {
  kOk = 0,         // every byte was moved, and verified if a digest was requested
  kFailed = 1,     // the pages that the result lists are unusable; all other pages are good
  kCancelled = 2,  // the op was never issued: no byte moved, and the caller only releases the pins
  kSkipped = 3,    // a predecessor failed, so this op (or page) was not issued
  kLaneDown = 4,   // the lane was taken out of service; the caller may try another tier
};

// Why a page failed. The cause decides whether flexkv keeps the page's stored copy and may read it again.
enum class FailureCause : uint8_t {
  kUnknown = 0,      // no cause was reported; treated as kContent: the stored copy is forgotten
  kContent = 1,      // the stored bytes are not the requested page
  kSource = 2,       // the disk refused the read or returned too few bytes
  kTransport = 3,    // memory, a device, its driver or the lane failed; any other page would have failed, too
  kNotExecuted = 4,  // the copy was cancelled, was late or had not begun
};

}  // namespace flexkv
