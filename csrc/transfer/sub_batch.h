// The number of bytes of an op that move as one unit.
#pragma once
#include <cstdint>

namespace flexkv {

// Unit: bytes. The maximum that a lane takes at once and enqueues on a GPU's stream as one unit. The size is
// small enough that a load never waits long behind a store: at most ~0.5 ms of host copy, or 0.2 ms over PCIe
// 5. It is large enough that taking a work item (~1 us) costs less than 1 % of moving it.
inline constexpr int64_t kSubBatchBytes = int64_t{8} << 20;

}  // namespace flexkv
