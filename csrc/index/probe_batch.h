// How many keys are probed in the key map at once.
#pragma once
#include <cstddef>

namespace flexkv {

// How many probes are in flight: enough to hide memory latency, few enough for the line-fill buffers. Source:
// sweep of 8..64 on Zen 3, flat from 16 on.
inline constexpr size_t kProbeBatch = 32;

// How many keys are hashed before the first of them is probed: probes overlap better if nothing but memory
// delays them. Source: CPU time of finding and of evicting 8,192 of 1M blocks at 32, 128, 512 and 2,048 on
// Zen 3; flat from 512 on.
inline constexpr size_t kHashBatch = 512;

}  // namespace flexkv
