// How much of an op moves as one.
#pragma once
#include <cstdint>

namespace flexkv {

// Unit: bytes. What a lane takes at once, and what is enqueued on a GPU's stream as one: a waiting load gets
// in after at most this much of a store (~0.5 ms of host copy, 0.2 ms of PCIe 5), while a take (~1 us) stays
// below 1 % of a work item.
inline constexpr int64_t kSubBatchBytes = int64_t{8} << 20;

}  // namespace flexkv
