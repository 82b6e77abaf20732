// How many probes of the key map are in flight at once.
#pragma once
#include <cstddef>

namespace flexkv {

// Keys in flight of a batch of probes. Enough to cover memory latency, few enough to stay in the line-fill
// buffers. Source: sweep of 8..64 on Zen 3, flat from 16 on.
inline constexpr size_t kProbeBatch = 32;

}  // namespace flexkv
