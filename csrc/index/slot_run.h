// Detects slots with consecutive numbers. The data in such slots is contiguous and can be copied as one
// piece.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace flexkv {

// Whether `slots` is not empty, and each slot number is 1 greater than the number before it.
inline bool in_a_row(std::span<const int32_t> slots) {
  if (slots.empty()) return false;
  // The loop body has no branch, so that the compiler can translate it into a few vector instructions per 16
  // slots.
  const auto first = static_cast<uint32_t>(slots.front());
  uint32_t differs = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    differs |= static_cast<uint32_t>(slots[i]) ^ (first + static_cast<uint32_t>(i));
  }
  return differs == 0;
}

}  // namespace flexkv
