// Slots that lie in a row: what is kept by slot can then be taken as one piece.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace flexkv {

// Whether there is a slot, and each of the others follows the one before it.
inline bool in_a_row(std::span<const int32_t> slots) {
  if (slots.empty()) return false;
  // Without a branch in the loop, so that it is a few vector instructions for each 16 slots.
  const auto first = static_cast<uint32_t>(slots.front());
  uint32_t differs = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    differs |= static_cast<uint32_t>(slots[i]) ^ (first + static_cast<uint32_t>(i));
  }
  return differs == 0;
}

}  // namespace flexkv
