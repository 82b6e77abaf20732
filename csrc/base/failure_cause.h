// What a page's failure says of the copy that was asked for: whether it is worth asking for again.
#pragma once
#include <cstdint>

namespace flexkv {

enum class FailureCause : uint8_t {
  kUnknown = 0,      // nobody said: taken for kContent, never a page too few
  kContent = 1,      // what is stored is not what was asked for
  kSource = 2,       // the disk did not give it, or gave less
  kTransport = 3,    // memory, a device, its driver or the lane: no page would have fared better
  kNotExecuted = 4,  // cancelled, late or not begun
};

}  // namespace flexkv
