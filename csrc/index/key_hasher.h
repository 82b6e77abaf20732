// Turns an engine's block keys into namespaced block keys.
//
// key = first 16 bytes of SHA-256( one 64-byte prefix block: label, namespace, group
//                                  | u32 length, engine key ).
// The prefix has a fixed size and the rest carries its length, so no two different inputs give the same
// bytes. The prefix fills exactly one compression block, whose state is kept, so that a key of up to 51 bytes
// costs one compression.
//
// In a namespace that has a mark, keys end with it, and have 112 bits of the hash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "index/block_key.h"
#include "index/sha256.h"

namespace flexkv {

inline constexpr size_t kMinEngineKeyBytes = 16;  // 128 bits: shorter keys can be made to collide
inline constexpr size_t kMaxEngineKeyBytes = 64;

// Throws KeySchemeError if an engine key of this length is not acceptable; `position` is for the message.
void check_engine_key_bytes(size_t bytes, size_t position);

class KeyHasher {
 public:
  KeyHasher(const Sha256Digest& namespace_digest, uint32_t group, std::optional<KeyMark> mark = std::nullopt);

  // Hashes engine keys, whose lengths must have passed check_engine_key_bytes. Writes kKeyBytes per key to
  // `out`.
  void block_keys(std::span<const std::span<const uint8_t>> engine_keys, uint8_t* out) const;

  // Hashes `tokens`, which follow the block of key `parent` (empty: they start the request). `extra` is what
  // the engine adds to that block's hash besides tokens and parent. Writes kKeyBytes to `out`.
  void tail_key(std::span<const uint8_t> parent, std::span<const uint8_t> extra,
                std::span<const uint32_t> tokens, uint8_t* out) const;

 private:
  void block_key(std::span<const uint8_t> engine_key, uint8_t* out) const;
  void write_key(const Sha256Digest& digest, uint8_t* out) const;

  Sha256 block_prefix_;
  Sha256 tail_prefix_;
  std::optional<KeyMark> mark_;
};

}  // namespace flexkv
