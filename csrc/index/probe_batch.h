// How many keys a lookup probes in the key map at once.
#pragma once
#include <cstddef>

namespace flexkv {

// How many probes have their memory accesses in flight at a time: enough to hide the memory latency, and few
// enough for the CPU's line-fill buffers. Source: measured from 8 to 64 on Zen 3; from 16 on, the time stays
// the same.
inline constexpr size_t kProbeBatch = 32;

// How many keys are hashed before the first of them is probed. The memory accesses of probes overlap better
// if no hashing comes between the probes. Source: CPU time to find and to evict 8,192 of 1M blocks on Zen 3,
// with 32, 128, 512 and 2,048 keys; from 512 on, the time stays the same.
inline constexpr size_t kHashBatch = 512;

}  // namespace flexkv
