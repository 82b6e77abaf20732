// The identity of a block in the index: the first 16 bytes of a SHA-256.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flexkv {

struct BlockKey {
  uint64_t low;
  uint64_t high;

  bool operator==(const BlockKey&) const = default;
};

inline constexpr size_t kKeyBytes = 16;
static_assert(sizeof(BlockKey) == kKeyBytes);

// Reads a key from memory of any alignment.
inline BlockKey load_key(const void* from) {
  BlockKey key;
  std::memcpy(&key, from, kKeyBytes);
  return key;
}

}  // namespace flexkv
