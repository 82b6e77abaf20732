// How many keys are probed in the key map at once.
#pragma once
#include <cstddef>

namespace flexkv {

// Keys in flight in a batch of probes: enough to cover memory latency, few enough to stay in the line-fill
// buffers. Source: sweep of 8..64 on Zen 3, flat from 16 on.
inline constexpr size_t kProbeBatch = 32;

// Keys that are hashed before the first of them is probed with kProbeBatch in flight: probes that wait only
// for memory overlap better. Source: CPU time of finding and of evicting 8,192 of 1M blocks at 32, 128, 512
// and 2,048 on Zen 3; flat from 512 on.
inline constexpr size_t kHashBatch = 512;

}  // namespace flexkv
