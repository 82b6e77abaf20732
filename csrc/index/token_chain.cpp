#include "index/token_chain.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/error.h"

namespace flexkv {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

TokenChain::TokenChain(size_t block_tokens, std::span<const uint8_t> seed, bool bigram)
    : block_tokens_(block_tokens), bigram_(bigram), seeded_(!seed.empty()) {
  if (block_tokens == 0) throw ConfigError("block_tokens is 0; allowed are 1 and more");
  if (seeded_ && seed.size() != seed_.size()) {
    throw KeySchemeError("the chain's seed has " + std::to_string(seed.size()) +
                         " bytes; allowed are 0 or 32 (a SHA-256 digest)");
  }
  std::copy(seed.begin(), seed.end(), seed_.begin());
}

size_t TokenChain::blocks_of(size_t tokens) const {
  const size_t elements = bigram_ && tokens > 0 ? tokens - 1 : tokens;
  return elements / block_tokens_;
}

void TokenChain::append(std::span<const uint32_t> tokens, size_t count) {
  if (tokens.size() != tokens_read(count)) {
    throw ContractError("TokenChain::append: " + std::to_string(tokens.size()) + " tokens given for " +
                        std::to_string(count) + " blocks; needed are " + std::to_string(tokens_read(count)));
  }
  if (count == 0) return;
  uint8_t* out = digests_.reserve(count);
  const uint8_t* prior = blocks() > 0 ? digests_.row(blocks() - 1) : seeded_ ? seed_.data() : nullptr;
  for (size_t block = 0; block < count; ++block) {
    Sha256 hash;
    if (prior) hash.update(prior, sizeof(Sha256Digest));
    const uint32_t* first = tokens.data() + block * block_tokens_;
    if (bigram_) {
      for (size_t i = 0; i < block_tokens_; ++i) hash.update(first + i, 2 * sizeof(uint32_t));
    } else {
      hash.update(first, block_tokens_ * sizeof(uint32_t));
    }
    const Sha256Digest digest = hash.finish();
    std::copy(digest.begin(), digest.end(), out);
    prior = out;
    out += sizeof(Sha256Digest);
  }
  digests_.commit(count);
}

}  // namespace flexkv
