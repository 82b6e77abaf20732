// How many times longer the stress tests run (FLEXKV_SOAK, 1 if it is not set), and how much shorter under a
// sanitizer.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flexkv {

// ThreadSanitizer makes every memory access about ten times slower. Under it there are fewer cases that
// differ only in sizes or have one thread; the cases with several threads stay.
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
