// The number of bytes of an op that a lane takes as one unit.
#pragma once
#include <cstdint>

namespace flexkv {

// Unit: bytes. The maximum size of the unit that a lane takes at once and enqueues on a GPU's stream. It is
// small enough that a load never waits long behind a store: copying one unit takes at most ~0.5 ms in host
// memory, or 0.2 ms over PCIe 5. It is large enough that taking a work item (~1 us) costs less than 1 % of
// moving it.
inline constexpr int64_t kSubBatchBytes = int64_t{8} << 20;

}  // namespace flexkv
