// Chained block digests computed from token ids, for inference engines that provide no block keys: digest(i)
// = SHA-256( digest(i - 1) | each token of block i as little-endian u32 ). The first block has no previous
// digest unless a seed is given. SGLang computes the same chain, so several inference engines can share one
// cache. The bigram form, for EAGLE drafts, hashes each token together with its successor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "index/row_buffer.h"
#include "index/sha256.h"

namespace flexkv {

class TokenChain {
 public:
  // `seed` is a SHA-256 digest that is used as the digest before the first block. If `seed` is empty, no
  // digest precedes the first block. Throws ConfigError if `block_tokens` is 0, and KeySchemeError if the
  // seed's length is neither 0 nor 32 bytes.
  TokenChain(size_t block_tokens, std::span<const uint8_t> seed, bool bigram);

  size_t blocks() const { return digests_.rows(); }
  size_t block_tokens() const { return block_tokens_; }
  const RowBuffer& digests() const { return digests_; }

  // The position of the first token of the next block to append.
  size_t next_token() const { return blocks() * block_tokens_; }

  // How many complete blocks a request of `tokens` tokens has.
  size_t blocks_of(size_t tokens) const;

  // Returns how many tokens, beginning at next_token(), are needed for the digests of the next `count`
  // blocks.
  size_t tokens_read(size_t count) const {
    return count == 0 ? 0 : count * block_tokens_ + (bigram_ ? 1 : 0);
  }

  // Appends the digests of `count` blocks. `tokens`: tokens_read(count) token ids, beginning with the token
  // at next_token(). Throws ContractError if `tokens` has a different length.
  void append(std::span<const uint32_t> tokens, size_t count);

  void truncate(size_t blocks) { digests_.truncate(blocks); }

 private:
  size_t block_tokens_;
  bool bigram_;
  bool seeded_;
  Sha256Digest seed_{};
  RowBuffer digests_{sizeof(Sha256Digest)};
};

}  // namespace flexkv
