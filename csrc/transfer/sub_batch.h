// How many bytes of an op move as one unit.
#pragma once
#include <cstdint>

namespace flexkv {

// Unit: bytes. How much a lane takes at once, and enqueues on a GPU's stream as one unit: a waiting load
// starts after at most this much of a store (~0.5 ms of host copy, 0.2 ms over PCIe 5), while a take (~1 us)
// stays below 1 % of a work item.
inline constexpr int64_t kSubBatchBytes = int64_t{8} << 20;

}  // namespace flexkv
