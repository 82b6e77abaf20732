#include "index/key_hasher.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "base/error.h"

namespace flexkv {
namespace {

constexpr size_t kLabelBytes = 24;
constexpr std::string_view kBlockLabel = "flexkv block key v1";
constexpr std::string_view kTailLabel = "flexkv tail key v1";
constexpr size_t kLengthBytes = 4;
constexpr size_t kPaddingBytes = 9;  // the 0x80 byte and the 64-bit length at the end of a SHA-256 message
constexpr size_t kOneBlockKeyBytes = kSha256BlockBytes - kLengthBytes - kPaddingBytes;

void store_le32(uint32_t value, uint8_t* out) {
  for (int byte = 0; byte < 4; ++byte) out[byte] = static_cast<uint8_t>(value >> (8 * byte));
}

void update_le32(Sha256& hash, size_t value) {
  uint8_t bytes[4];
  store_le32(static_cast<uint32_t>(value), bytes);
  hash.update(bytes, sizeof(bytes));
}

Sha256 prefix(std::string_view label, const Sha256Digest& namespace_digest, uint32_t group) {
  uint8_t block[kSha256BlockBytes] = {};
  std::copy(label.begin(), label.end(), block);
  std::copy(namespace_digest.begin(), namespace_digest.end(), block + kLabelBytes);
  store_le32(group, block + kLabelBytes + namespace_digest.size());
  Sha256 hash;
  hash.update(block, sizeof(block));
  return hash;
}

// Writes the last 64-byte block of the message whose hash is the key. (The message has two such blocks.) This
// block consists of the length as u32, the engine key and the SHA-256 padding.
void write_last_block(std::span<const uint8_t> engine_key, uint8_t* block) {
  std::fill_n(block, kSha256BlockBytes, uint8_t{0});
  store_le32(static_cast<uint32_t>(engine_key.size()), block);
  std::copy(engine_key.begin(), engine_key.end(), block + kLengthBytes);
  block[kLengthBytes + engine_key.size()] = 0x80;
  const uint64_t message_bits = (kSha256BlockBytes + kLengthBytes + engine_key.size()) * 8;
  block[62] = static_cast<uint8_t>(message_bits >> 8);
  block[63] = static_cast<uint8_t>(message_bits);
}

}  // namespace

void check_engine_key_bytes(size_t bytes, size_t position) {
  if (bytes >= kMinEngineKeyBytes && bytes <= kMaxEngineKeyBytes) return;
  throw KeySchemeError("engine block key " + std::to_string(position) + " has " + std::to_string(bytes) +
                       " bytes; allowed are 16 to 64 bytes from a cryptographic hash. In vLLM set "
                       "--prefix-caching-hash-algo sha256 (or sha256_cbor, stable over Python versions)");
}

KeyHasher::KeyHasher(const Sha256Digest& namespace_digest, uint32_t group, std::optional<KeyMark> mark)
    : block_prefix_(prefix(kBlockLabel, namespace_digest, group)),
      tail_prefix_(prefix(kTailLabel, namespace_digest, group)),
      mark_(mark) {}

void KeyHasher::write_key(const Sha256Digest& digest, uint8_t* out) const {
  std::copy_n(digest.begin(), kKeyBytes, out);
  if (mark_) std::copy(mark_->begin(), mark_->end(), out + kKeyBytes - kMarkBytes);
}

void KeyHasher::block_key(std::span<const uint8_t> engine_key, uint8_t* out) const {
  if (engine_key.size() > kOneBlockKeyBytes) {
    Sha256 hash = block_prefix_;
    update_le32(hash, engine_key.size());
    hash.update(engine_key.data(), engine_key.size());
    write_key(hash.finish(), out);
    return;
  }
  uint8_t block[kSha256BlockBytes];
  write_last_block(engine_key, block);
  Sha256State state = block_prefix_.state();
  sha256_compress()(state.data(), block, 1);
  write_key(sha256_digest(state), out);
}

void KeyHasher::block_keys(std::span<const std::span<const uint8_t>> engine_keys, uint8_t* out) const {
  const Sha256CompressPair compress = sha256_compress_pair();
  size_t i = 0;
  while (i < engine_keys.size()) {
    const bool pair = i + 1 < engine_keys.size() && engine_keys[i].size() <= kOneBlockKeyBytes &&
                      engine_keys[i + 1].size() <= kOneBlockKeyBytes;
    if (!pair) {
      block_key(engine_keys[i], out + i * kKeyBytes);
      ++i;
      continue;
    }
    uint8_t blocks[2][kSha256BlockBytes];
    Sha256State states[2] = {block_prefix_.state(), block_prefix_.state()};
    for (size_t k = 0; k < 2; ++k) write_last_block(engine_keys[i + k], blocks[k]);
    compress(states[0].data(), blocks[0], states[1].data(), blocks[1]);
    for (const Sha256State& state : states) write_key(sha256_digest(state), out + i++ * kKeyBytes);
  }
}

void KeyHasher::tail_key(std::span<const uint8_t> parent, std::span<const uint8_t> extra,
                         std::span<const uint32_t> tokens, uint8_t* out) const {
  Sha256 hash = tail_prefix_;
  update_le32(hash, parent.size());
  hash.update(parent.data(), parent.size());
  update_le32(hash, extra.size());
  hash.update(extra.data(), extra.size());
  update_le32(hash, tokens.size());
  for (const uint32_t token : tokens) update_le32(hash, token);
  write_key(hash.finish(), out);
}

}  // namespace flexkv
