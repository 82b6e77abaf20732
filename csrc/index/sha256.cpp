#include "index/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "index/sha256_constants.h"

namespace flexkv {
namespace {

uint32_t load_be32(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

uint32_t big_sigma0(uint32_t x) { return std::rotr(x, 2) ^ std::rotr(x, 13) ^ std::rotr(x, 22); }
uint32_t big_sigma1(uint32_t x) { return std::rotr(x, 6) ^ std::rotr(x, 11) ^ std::rotr(x, 25); }
uint32_t small_sigma0(uint32_t x) { return std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3); }
uint32_t small_sigma1(uint32_t x) { return std::rotr(x, 17) ^ std::rotr(x, 19) ^ (x >> 10); }

}  // namespace

void sha256_compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += kSha256BlockBytes) {
    uint32_t w[16];
    for (int t = 0; t < 16; ++t) w[t] = load_be32(data + 4 * t);
    uint32_t v[8];
    std::copy(state, state + 8, v);
    // In the unrolled loop, every index is a constant. So the eight words do not have to be moved when their
    // roles change from round to round.
#pragma GCC unroll 64
    for (int t = 0; t < 64; ++t) {
      if (t >= 16) {
        w[t & 15] += small_sigma1(w[(t - 2) & 15]) + w[(t - 7) & 15] + small_sigma0(w[(t - 15) & 15]);
      }
      const auto word = [&](int i) -> uint32_t& { return v[(i - t) & 7]; };
      const uint32_t choose = (word(4) & word(5)) ^ (~word(4) & word(6));
      const uint32_t majority = (word(0) & word(1)) ^ (word(0) & word(2)) ^ (word(1) & word(2));
      const uint32_t t1 = word(7) + big_sigma1(word(4)) + choose + kSha256RoundConstants[t] + w[t & 15];
      word(3) += t1;
      word(7) = t1 + big_sigma0(word(0)) + majority;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

Sha256Compress sha256_compress() {
  static const Sha256Compress chosen = [] {
    const Sha256Compress native = sha256_native_compress();
    return native ? native : sha256_compress_portable;
  }();
  return chosen;
}

Sha256CompressPair sha256_compress_pair() {
  static const Sha256CompressPair chosen = [] {
    const Sha256CompressPair native = sha256_native_compress_pair();
    return native ? native
                  : [](uint32_t* first, const uint8_t* first_block, uint32_t* second,
                       const uint8_t* second_block) {
                      sha256_compress_portable(first, first_block, 1);
                      sha256_compress_portable(second, second_block, 1);
                    };
  }();
  return chosen;
}

Sha256Digest sha256_digest(const Sha256State& state) {
  Sha256Digest digest;
  for (size_t i = 0; i < state.size(); ++i) {
    for (size_t byte = 0; byte < 4; ++byte) {
      digest[4 * i + byte] = static_cast<uint8_t>(state[i] >> (24 - 8 * byte));
    }
  }
  return digest;
}

void Sha256::update(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  total_bytes_ += bytes;
  if (pending_bytes_ > 0) {
    const size_t taken = std::min(bytes, kSha256BlockBytes - pending_bytes_);
    if (taken > 0) std::memcpy(pending_.data() + pending_bytes_, from, taken);
    pending_bytes_ += taken;
    from += taken;
    bytes -= taken;
    if (pending_bytes_ < kSha256BlockBytes) return;
    compress_(state_.data(), pending_.data(), 1);
    pending_bytes_ = 0;
  }
  const size_t whole = bytes / kSha256BlockBytes;
  if (whole > 0) compress_(state_.data(), from, whole);
  pending_bytes_ = bytes - whole * kSha256BlockBytes;
  if (pending_bytes_ > 0) std::memcpy(pending_.data(), from + whole * kSha256BlockBytes, pending_bytes_);
}

Sha256Digest Sha256::finish() {
  const uint64_t total_bits = total_bytes_ * 8;
  pending_[pending_bytes_++] = 0x80;
  if (pending_bytes_ > kSha256BlockBytes - 8) {
    std::fill(pending_.begin() + static_cast<std::ptrdiff_t>(pending_bytes_), pending_.end(), uint8_t{0});
    compress_(state_.data(), pending_.data(), 1);
    pending_bytes_ = 0;
  }
  std::fill(pending_.begin() + static_cast<std::ptrdiff_t>(pending_bytes_), pending_.end() - 8, uint8_t{0});
  for (size_t i = 0; i < 8; ++i) pending_[56 + i] = static_cast<uint8_t>(total_bits >> (56 - 8 * i));
  compress_(state_.data(), pending_.data(), 1);
  return sha256_digest(state_);
}

}  // namespace flexkv
