// The key that identifies a block in the index: the first 16 bytes of a SHA-256 digest.
#pragma once
#include <array>
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

// A mark: the bytes at the end of each key of a namespace, if the caller gave the namespace a name. An index
// uses the mark to find the namespace's blocks. By chance, keys of other namespaces may end with the same
// bytes.
inline constexpr size_t kMarkBytes = 2;
using KeyMark = std::array<uint8_t, kMarkBytes>;

inline bool has_mark(const BlockKey& key, const KeyMark& mark) {
  return std::memcmp(reinterpret_cast<const uint8_t*>(&key) + kKeyBytes - kMarkBytes, mark.data(),
                     kMarkBytes) == 0;
}

// Reads a key from an address of any alignment.
inline BlockKey load_key(const void* from) {
  BlockKey key;
  std::memcpy(&key, from, kKeyBytes);
  return key;
}

}  // namespace flexkv
