// Conversions of deadlines that callers give in seconds from now.
#pragma once
#include <algorithm>
#include <chrono>

namespace flexkv {

using Clock = std::chrono::steady_clock;

// Unit: seconds. Longer waits are cut to this value, about 100 days, because they could overflow the clock's
// arithmetic.
inline constexpr double kLongestWaitS = 1e7;

inline std::chrono::nanoseconds to_duration(double seconds) {
  // The condition is `seconds > 0`, so that NaN becomes 0.
  const double bounded = seconds > 0 ? std::min(seconds, kLongestWaitS) : 0.0;
  return std::chrono::nanoseconds(static_cast<int64_t>(bounded * 1e9));
}

inline Clock::time_point deadline_in(double seconds) { return Clock::now() + to_duration(seconds); }

inline double seconds_until(Clock::time_point when) {
  return std::chrono::duration<double>(when - Clock::now()).count();
}

inline double seconds_since(Clock::time_point when) { return -seconds_until(when); }

}  // namespace flexkv
