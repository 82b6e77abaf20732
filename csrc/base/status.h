// The outcome of an op on pages, and the causes of page failures.
#pragma once
#include <cstdint>

namespace flexkv {

enum class Status : int32_t {
  kOk = 0,         // every byte was moved, and verified if a digest was requested
  kFailed = 1,     // the pages listed in the result are unusable; all other pages are good
  kCancelled = 2,  // the op was never issued: no byte was moved, and the caller only has to release the pins
  kSkipped = 3,    // an op before this one failed, so this op (or page) was not issued
  kLaneDown = 4,   // the lane was taken out of service; the caller may try another tier
};

// Why a page failed. The cause decides whether flexkv keeps the page's stored copy and may read it again.
enum class FailureCause : uint8_t {
  kUnknown = 0,  // no cause was reported; treated like kContent: flexkv forgets the stored copy
  kContent = 1,  // the stored bytes are not those of the requested page
  kSource = 2,   // the disk refused the read or returned too few bytes
  // Memory, a device, its driver or the lane failed. With any other page, the op would have failed, too.
  kTransport = 3,
  kNotExecuted = 4,  // the copy was cancelled, was late or had not begun
};

}  // namespace flexkv
