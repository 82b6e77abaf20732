// Reads FLEXKV_SOAK, the factor by which the stress tests run longer; 1 if it is not set. This header also
// says which sanitizer the build has, so that tests can do less work with it.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flexkv {

// ThreadSanitizer makes every memory access about ten times slower. With ThreadSanitizer, tests run all cases
// that use several threads. They leave out some of the cases that use one thread or differ only in sizes.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = kThreadSanitizer;
#endif

inline int soak_factor() {
  const char* text = std::getenv("FLEXKV_SOAK");
  if (text == nullptr) return 1;
  char* end = nullptr;
  const long factor = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || factor < 1 || factor > 1'000'000) {
    throw std::invalid_argument("FLEXKV_SOAK='" + std::string(text) + "': expected a whole number from 1");
  }
  return static_cast<int>(factor);
}

}  // namespace flexkv
