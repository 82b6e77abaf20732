// The digest of KV bytes. The bytes are divided into leaves of 4 KiB, which may be digested in any order.
// docs/digest.md specifies the digest. It detects damage and mix-ups at memory speed, but is not a
// cryptographic hash.
//
// The functions that compute the parts of a digest are FLEXKV_HD and work word by word, so that a CPU core,
// an AVX2 unit and a GPU warp share one definition.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

inline constexpr int64_t kLeafBytes = 4096;
inline constexpr int kLeafWords = kLeafBytes / 8;
// The number of separate sums per leaf: word i goes into the sums of lane i % kDigestLanes. So if a word of
// one lane changes, a change of a word in another lane cannot compensate for this in a sum. Within a lane,
// the product of each word depends on the word's position.
inline constexpr int kDigestLanes = 8;

// Output `i` of SplitMix64 (Steele, Lea, Flood 2014), seeded with the first 64 bits of pi's fraction.
FLEXKV_HD constexpr uint64_t digest_constant(uint64_t i) {
  uint64_t z = 0x243F6A8885A308D3u + (i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The arguments of digest_constant() for the constants that are not keys of words. The arguments 0 to 511
// give the keys of a leaf's words; the arguments below come after these.
inline constexpr uint64_t kFoldConstantA = kLeafWords;
inline constexpr uint64_t kFoldConstantB = kFoldConstantA + kDigestLanes;
inline constexpr uint64_t kLengthConstant = kFoldConstantB + kDigestLanes;
inline constexpr uint64_t kIndexConstant = kLengthConstant + 1;
inline constexpr uint64_t kRunConstant = kIndexConstant + 1;

// A bijection in which every input bit reaches every output bit: SplitMix64's finaliser.
FLEXKV_HD constexpr uint64_t digest_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

FLEXKV_HD inline uint64_t multiply_fold(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

// The sums of one digest lane. The lane's words are those words of a leaf whose index modulo kDigestLanes is
// the lane's number. Each thread may hold partial sums, which may be added up in any order because addition
// is commutative.
struct LaneSums {
  uint64_t products = 0;  // depends on the position of each word in the leaf
  uint64_t words = 0;     // changes if one word changes, even if that word's product does not

  // Adds word i of the leaf, which is read as little-endian. If the leaf ends within the word, the rest of
  // the word is zeros. `key` is digest_constant(i).
  FLEXKV_HD void add(uint64_t word, uint64_t key) {
    const uint64_t x = word ^ key;
    products += (x & 0xFFFFFFFFu) * (x >> 32);
    words += word;
  }
  FLEXKV_HD void add(const LaneSums& other) {
    products += other.products;
    words += other.words;
  }
  FLEXKV_HD uint64_t folded(int lane) const {
    return multiply_fold(products ^ digest_constant(kFoldConstantA + static_cast<uint64_t>(lane)),
                         words ^ digest_constant(kFoldConstantB + static_cast<uint64_t>(lane)));
  }
};

// The term that leaf number `index` of a run adds to the run's sum. `folded` is the sum of folded() over the
// digest lanes. `bytes` is the leaf's length, in [1, 4096].
FLEXKV_HD inline uint64_t leaf_term(uint64_t folded, uint64_t index, uint64_t bytes) {
  return digest_mix(digest_mix(folded + bytes * digest_constant(kLengthConstant)) +
                    (index + 1) * digest_constant(kIndexConstant));
}

// Returns the digest of a run. `sum_of_terms`: the sum of the terms of the run's leaves, which may be added
// in any order.
FLEXKV_HD inline uint64_t finish_run(uint64_t sum_of_terms, uint64_t run_bytes) {
  return digest_mix(sum_of_terms + run_bytes * digest_constant(kRunConstant));
}

// Returns the digest of a run. Uses AVX2 if the CPU has it. `bytes` may be 0.
uint64_t run_digest(const void* data, size_t bytes);
// Returns the sum of the terms of the leaves in `data`. The first leaf in `data` is leaf `first_leaf` of the
// run. A caller that digests a run piece by piece adds up the sums of all pieces and passes the total to
// finish_run(). Every piece except the run's last consists of complete leaves.
uint64_t run_terms(const void* data, size_t bytes, uint64_t first_leaf);
// Computes the same digest as run_digest(), one word at a time and without AVX2.
uint64_t run_digest_scalar(const void* data, size_t bytes);
bool digest_uses_avx2();

}  // namespace flexkv
