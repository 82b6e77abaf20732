// How many keys a lookup probes in the key map at once.
#pragma once
#include <cstddef>

namespace flexkv {

// How many probes have their memory accesses in flight at a time: enough to hide the memory latency, and few
// enough for the CPU's line-fill buffers. Source: a sweep from 8 to 64 on Zen 3; the time is flat from 16 on.
inline constexpr size_t kProbeBatch = 32;

// How many keys are hashed before the first of them is probed. Probes overlap better if no hashing comes
// between them. Source: CPU time to find and to evict 8,192 of 1M blocks on Zen 3, with 32, 128, 512 and
// 2,048 keys; the time is flat from 512 on.
inline constexpr size_t kHashBatch = 512;

}  // namespace flexkv
