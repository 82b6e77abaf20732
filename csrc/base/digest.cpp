#include "base/digest.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace flexkv {
namespace {

// Unit: bytes. How far ahead of the current word to prefetch. The hardware prefetcher stops at 4 KiB
// boundaries, and every full leaf reaches such a boundary. But on a Zen 3 core, the digest is equally fast
// with all values from 512 to 4096 and without prefetching, for cold and for cached buffers.
constexpr size_t kPrefetchBytes = 2048;

constexpr auto kWordKeys = [] {
  std::array<uint64_t, kLeafWords> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = digest_constant(i);
  return keys;
}();
alignas(64) constexpr std::array<uint64_t, kLeafWords> kKeys = kWordKeys;

using Lanes = std::array<LaneSums, kDigestLanes>;

uint64_t fold(const Lanes& lanes) {
  uint64_t folded = 0;
  for (int lane = 0; lane < kDigestLanes; ++lane) folded += lanes[static_cast<size_t>(lane)].folded(lane);
  return folded;
}

// Adds the words of a leaf, beginning with word `first`. The leaf's last word may have fewer than 8 bytes.
void add_words(Lanes& lanes, const std::byte* leaf, size_t bytes, size_t first) {
  for (size_t i = first; i * 8 < bytes; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, leaf + i * 8, std::min<size_t>(8, bytes - i * 8));
    lanes[i % kDigestLanes].add(word, kKeys[i]);
  }
}

uint64_t leaf_scalar(const std::byte* leaf, size_t bytes) {
  Lanes lanes;
  add_words(lanes, leaf, bytes, 0);
  return fold(lanes);
}

__attribute__((target("avx2"))) uint64_t leaf_avx2(const std::byte* leaf, size_t bytes) {
  __m256i products[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  __m256i words[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const size_t whole = bytes / 64 * 64;
  for (size_t at = 0; at < whole; at += 64) {
    // A prefetch past the buffer's end is harmless: it never faults.
    _mm_prefetch(reinterpret_cast<const char*>(leaf) + at + kPrefetchBytes, _MM_HINT_T0);
    for (size_t half = 0; half < 2; ++half) {
      const size_t offset = at + half * 32;
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(leaf + offset));
      const __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(kKeys.data() + offset / 8));
      const __m256i x = _mm256_xor_si256(word, key);
      products[half] = _mm256_add_epi64(products[half], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
      words[half] = _mm256_add_epi64(words[half], word);
    }
  }
  alignas(32) uint64_t product_sums[kDigestLanes], word_sums[kDigestLanes];
  for (size_t half = 0; half < 2; ++half) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(product_sums + half * 4), products[half]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(word_sums + half * 4), words[half]);
  }
  Lanes lanes;
  for (size_t i = 0; i < kDigestLanes; ++i) lanes[i] = {product_sums[i], word_sums[i]};
  if (whole < bytes) add_words(lanes, leaf, bytes, whole / 8);
  return fold(lanes);
}

template <typename Leaf>
uint64_t terms_of(const void* data, size_t bytes, uint64_t first_leaf, Leaf leaf) {
  const auto* at = static_cast<const std::byte*>(data);
  uint64_t sum = 0;
  for (size_t offset = 0, index = first_leaf; offset < bytes; offset += kLeafBytes, ++index) {
    const size_t leaf_bytes = std::min<size_t>(kLeafBytes, bytes - offset);
    sum += leaf_term(leaf(at + offset, leaf_bytes), index, leaf_bytes);
  }
  return sum;
}

}  // namespace

bool digest_uses_avx2() {
  static const bool found = __builtin_cpu_supports("avx2");
  return found;
}

uint64_t run_terms(const void* data, size_t bytes, uint64_t first_leaf) {
  return digest_uses_avx2() ? terms_of(data, bytes, first_leaf, leaf_avx2)
                            : terms_of(data, bytes, first_leaf, leaf_scalar);
}

uint64_t run_digest_scalar(const void* data, size_t bytes) {
  return finish_run(terms_of(data, bytes, 0, leaf_scalar), bytes);
}

uint64_t run_digest(const void* data, size_t bytes) { return finish_run(run_terms(data, bytes, 0), bytes); }

}  // namespace flexkv
