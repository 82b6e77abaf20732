// Reads the wall clock, for the times that are recorded in pages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <ctime>

namespace flexkv {

// Unit: seconds since 1970. Returns 0 if the clock is set to a time before 1970: then no page counts as
// expired.
inline uint64_t unix_now() { return static_cast<uint64_t>(std::max<std::time_t>(0, std::time(nullptr))); }

}  // namespace flexkv
