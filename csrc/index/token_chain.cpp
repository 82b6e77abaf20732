#include "index/token_chain.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

namespace flexkv {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

namespace {

// A buffer for one message at a time. All messages have the same length, so the SHA-256 padding after the
// message is written only once.
class PaddedMessage {
 public:
  explicit PaddedMessage(size_t bytes)
      : buffer_((bytes + 9 + kSha256BlockBytes - 1) / kSha256BlockBytes * kSha256BlockBytes) {
    buffer_[bytes] = 0x80;
    const uint64_t bits = bytes * 8;
    for (size_t i = 0; i < 8; ++i) buffer_[buffer_.size() - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  }
  uint8_t* bytes() { return buffer_.data(); }
  Sha256Digest digest() const {
    Sha256State state = kSha256Init;
    sha256_compress()(state.data(), buffer_.data(), buffer_.size() / kSha256BlockBytes);
    return sha256_digest(state);
  }

 private:
  std::vector<uint8_t> buffer_;
};

}  // namespace

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
  // Each buffer holds one message at a time, laid out as [prior digest][tokens][0x80, zeros, length in bits].
  // Only the first two parts are rewritten for each block.
  const size_t prior_bytes = sizeof(Sha256Digest);
  const size_t token_bytes = (bigram_ ? 2 : 1) * block_tokens_ * sizeof(uint32_t);
  PaddedMessage with_prior(prior_bytes + token_bytes);
  PaddedMessage without_prior(token_bytes);
  for (size_t block = 0; block < count; ++block) {
    PaddedMessage& message = prior ? with_prior : without_prior;
    uint8_t* to = message.bytes();
    if (prior) to = std::copy_n(prior, prior_bytes, to);
    const uint32_t* first = tokens.data() + block * block_tokens_;
    if (bigram_) {
      for (size_t i = 0; i < block_tokens_; ++i) std::memcpy(to + 8 * i, first + i, 8);
    } else {
      std::memcpy(to, first, token_bytes);
    }
    const Sha256Digest digest = message.digest();
    prior = out;
    out = std::copy(digest.begin(), digest.end(), out);
  }
  digests_.commit(count);
}

}  // namespace flexkv
