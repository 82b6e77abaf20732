// Chained block digests from token ids, for engines that give no block keys of their own: digest(i) =
// SHA-256( digest(i - 1), absent for the first block | each token as u32 little endian ). SGLang chains its
// pages in the same way, so that several engines can share one cache. The bigram form, for EAGLE drafts,
// hashes each token together with its successor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "index/row_buffer.h"
#include "index/sha256.h"

namespace flexkv {

class TokenChain {
 public:
  // `seed`: empty, or the digest that precedes the first block. Throws ConfigError for 0 tokens per block,
  // KeySchemeError for a seed of another length.
  TokenChain(size_t block_tokens, std::span<const uint8_t> seed, bool bigram);

  size_t blocks() const { return digests_.rows(); }
  size_t block_tokens() const { return block_tokens_; }
  const RowBuffer& digests() const { return digests_; }

  // The first token that the next block reads.
  size_t next_token() const { return blocks() * block_tokens_; }

  // How many whole blocks a request of `tokens` tokens has.
  size_t blocks_of(size_t tokens) const;

  // How many tokens the next `count` blocks read from next_token() on.
  size_t tokens_read(size_t count) const {
    return count == 0 ? 0 : count * block_tokens_ + (bigram_ ? 1 : 0);
  }

  // Appends `count` blocks; `tokens` holds tokens_read(count) ids from next_token() on.
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
