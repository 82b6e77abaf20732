// How much longer the stress tests run: FLEXKV_SOAK, 1 when it is not set.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flexkv {

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
