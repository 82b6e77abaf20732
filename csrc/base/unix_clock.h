// The wall-clock time that pages record.
#pragma once
#include <algorithm>
#include <cstdint>
#include <ctime>

namespace flexkv {

// Unit: seconds. A clock before 1970 counts as 1970, when nothing has expired yet.
inline uint64_t unix_now() { return static_cast<uint64_t>(std::max<std::time_t>(0, std::time(nullptr))); }

}  // namespace flexkv
