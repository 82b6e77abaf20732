// The numbers of keys that a lookup hashes and probes in the key map at once.
#pragma once
#include <cstddef>

namespace flexkv {

// How many probes have memory accesses in flight at a time: enough to hide the memory latency, and few enough
// for the CPU's line-fill buffers. Values from 8 to 64 were measured on Zen 3: from 16 on, a larger value
// does not reduce the time.
inline constexpr size_t kProbeBatch = 32;

// How many keys are hashed before the first of them is probed. The memory accesses of probes overlap better
// if no key is hashed between the probes. The values 32, 128, 512 and 2,048 were measured on Zen 3, by the
// CPU time to find and to evict 8,192 of 1M blocks: from 512 on, a larger value does not reduce the time.
inline constexpr size_t kHashBatch = 512;

}  // namespace flexkv
