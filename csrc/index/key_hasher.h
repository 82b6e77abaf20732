// Computes flexkv's block keys from the inference engine's block keys, the namespace and the KV group.
//
// key = first 16 bytes of SHA-256( one 64-byte prefix block: label, namespace, group
//                                  | u32 length, engine key ).
//
// The prefix block has a fixed size, and the engine key is preceded by its length, so no two different inputs
// give the same message. The prefix fills exactly one block of SHA-256's compression function. KeyHasher
// stores the hash state after this block, so for an engine key of up to 51 bytes, only one more block has to
// be compressed.
//
// If the namespace has a mark, the last 2 bytes of each key are the mark, and the first 112 bits are the
// hash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "index/block_key.h"
#include "index/sha256.h"

namespace flexkv {

inline constexpr size_t kMinEngineKeyBytes = 16;  // with fewer bytes, an attacker could make keys collide
inline constexpr size_t kMaxEngineKeyBytes = 64;

// Throws KeySchemeError if engine keys of this length are not accepted. `position`: the key's number, for the
// error message.
void check_engine_key_bytes(size_t bytes, size_t position);

class KeyHasher {
 public:
  KeyHasher(const Sha256Digest& namespace_digest, uint32_t group, std::optional<KeyMark> mark = std::nullopt);

  // Writes the block keys of all engine keys, of kKeyBytes each, to `out`. Precondition: the lengths of the
  // engine keys have passed check_engine_key_bytes.
  void block_keys(std::span<const std::span<const uint8_t>> engine_keys, uint8_t* out) const;

  // Writes the key of a partial tail (the tokens after a request's last complete block) to `out`; the key has
  // kKeyBytes. `tokens`: the tokens of the tail. `parent`: the engine key of the block before the tail; empty
  // if the request consists only of the tail. `extra`: the other data that the engine adds to the tail's
  // hash.
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
