// Functions that load, rotate and store eight pairs at a time, for both pairings. Results are bit-identical
// to those of turn_pair() and the conversions of element.h.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "rope/rotation.h"

#define FLEXKV_AVX2 __attribute__((target("avx2,fma,f16c"), always_inline)) inline

namespace flexkv::avx2 {

inline constexpr int kPairs = 8;
// Unit: bytes. The alignment that a head's destination needs for streaming stores. It is the width of the
// widest streaming store.
inline constexpr size_t kStreamAlign = 32;

struct Pairs {
  __m256 x, y;
};

// How rotated pairs are written: through the CPU caches, or with stores that bypass the caches, which need an
// aligned destination.
enum class Write { kCached, kStreamed };

template <Write kWrite>
FLEXKV_AVX2 void put(void* to, __m256i value) {
  if constexpr (kWrite == Write::kStreamed) {
    _mm256_stream_si256(static_cast<__m256i*>(to), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(to), value);
  }
}
template <Write kWrite>
FLEXKV_AVX2 void put(void* to, __m128i value) {
  if constexpr (kWrite == Write::kStreamed) {
    _mm_stream_si128(static_cast<__m128i*>(to), value);
  } else {
    _mm_storeu_si128(static_cast<__m128i*>(to), value);
  }
}
template <Write kWrite>
FLEXKV_AVX2 void put(void* to, __m256 value) {
  put<kWrite>(to, _mm256_castps_si256(value));
}

// Copies `bytes` with stores that bypass the caches, except for a tail shorter than kStreamAlign.
// Precondition: `dst` is aligned to kStreamAlign.
FLEXKV_AVX2 void stream(unsigned char* dst, const unsigned char* src, size_t bytes) {
  size_t at = 0;
  for (; at + kStreamAlign <= bytes; at += kStreamAlign) {
    put<Write::kStreamed>(dst + at, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at)));
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

// Applies turn_pair() to eight pairs. fmsub is the fused multiply-add with a negated addend.
FLEXKV_AVX2 Pairs turn(const Pairs& pairs, __m256 cosines, __m256 sines) {
  return {_mm256_fmsub_ps(pairs.x, cosines, _mm256_mul_ps(pairs.y, sines)),
          _mm256_fmadd_ps(pairs.y, cosines, _mm256_mul_ps(pairs.x, sines))};
}

FLEXKV_AVX2 __m256i load_bits(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
FLEXKV_AVX2 __m128i load_half(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
// Swaps the two middle quarters of a vector: returns the quarters in the order 0, 2, 1, 3.
FLEXKV_AVX2 __m256i swap_middle(__m256i quarters) { return _mm256_permute4x64_epi64(quarters, 0xD8); }

struct PairBits {
  __m256i x, y;
};

// Rounds each float to the nearest bfloat16, ties to even. The bfloat16 is the upper half of each 32-bit
// result; the lower half has no meaning.
FLEXKV_AVX2 __m256i round_to_upper(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
}
// Rounding does not test for NaN, but never turns a NaN into a number: a NaN that results from a rotation has
// either no payload or the payload of a bfloat16 key. In both cases the lower half of the NaN is zero, so
// rounding does not change it. This relies on check_rotation_rows(), which rejects sines and cosines that are
// NaN.
FLEXKV_AVX2 PairBits to_bfloat16(const Pairs& pairs) {
  return {round_to_upper(pairs.x), round_to_upper(pairs.y)};
}
FLEXKV_AVX2 __m128i to_float16(__m256 value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

// --- NeoX: each of eight consecutive elements forms a pair with the element that lies `half` elements later
// ---

FLEXKV_AVX2 Pairs load_halves(const float* from, int32_t half) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + half)};
}
FLEXKV_AVX2 __m256 widen(const Bfloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
}
FLEXKV_AVX2 Pairs load_halves(const Bfloat16* from, int32_t half) {
  return {widen(from), widen(from + half)};
}
FLEXKV_AVX2 Pairs load_halves(const Float16* from, int32_t half) {
  return {_mm256_cvtph_ps(load_half(from)), _mm256_cvtph_ps(load_half(from + half))};
}
template <Write kWrite>
FLEXKV_AVX2 void store_halves(float* to, int32_t half, const Pairs& pairs) {
  put<kWrite>(to, pairs.x);
  put<kWrite>(to + half, pairs.y);
}
template <Write kWrite>
FLEXKV_AVX2 void store_halves(Bfloat16* to, int32_t half, const Pairs& pairs) {
  const PairBits bits = to_bfloat16(pairs);
  const __m256i both =
      swap_middle(_mm256_packus_epi32(_mm256_srli_epi32(bits.x, 16), _mm256_srli_epi32(bits.y, 16)));
  put<kWrite>(to, _mm256_castsi256_si128(both));
  put<kWrite>(to + half, _mm256_extracti128_si256(both, 1));
}
template <Write kWrite>
FLEXKV_AVX2 void store_halves(Float16* to, int32_t half, const Pairs& pairs) {
  put<kWrite>(to, to_float16(pairs.x));
  put<kWrite>(to + half, to_float16(pairs.y));
}

// --- GPT-J: eight pairs of neighbouring elements ---

// Loads eight cosines or sines in the order in which load_neighbours() loads pairs. For float32 this order is
// 0, 1, 4, 5, 2, 3, 6, 7, because load_neighbours() shuffles the pairs; the unpacking in store_neighbours()
// restores the original order in memory.
template <typename Element>
FLEXKV_AVX2 __m256 angles_of_neighbours(const float* from) {
  const __m256 angles = _mm256_loadu_ps(from);
  if constexpr (sizeof(Element) == sizeof(float)) {
    return _mm256_castsi256_ps(swap_middle(_mm256_castps_si256(angles)));
  } else {
    return angles;
  }
}
FLEXKV_AVX2 Pairs load_neighbours(const float* from) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + kPairs);
  return {_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)};
}
FLEXKV_AVX2 Pairs load_neighbours(const Bfloat16* from) {
  const __m256i both = load_bits(from);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, upper))};
}
FLEXKV_AVX2 Pairs load_neighbours(const Float16* from) {
  const __m256i firsts_then_seconds =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i apart = swap_middle(_mm256_shuffle_epi8(load_bits(from), firsts_then_seconds));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(apart)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1))};
}
template <Write kWrite>
FLEXKV_AVX2 void store_neighbours(float* to, const Pairs& pairs) {
  put<kWrite>(to, _mm256_unpacklo_ps(pairs.x, pairs.y));
  put<kWrite>(to + kPairs, _mm256_unpackhi_ps(pairs.x, pairs.y));
}
template <Write kWrite>
FLEXKV_AVX2 void store_neighbours(Bfloat16* to, const Pairs& pairs) {
  const PairBits bits = to_bfloat16(pairs);
  constexpr int kUppers = 0xAA;
  put<kWrite>(to, _mm256_blend_epi16(_mm256_srli_epi32(bits.x, 16), bits.y, kUppers));
}
template <Write kWrite>
FLEXKV_AVX2 void store_neighbours(Float16* to, const Pairs& pairs) {
  const __m128i x = to_float16(pairs.x), y = to_float16(pairs.y);
  put<kWrite>(to, _mm_unpacklo_epi16(x, y));
  put<kWrite>(to + kPairs, _mm_unpackhi_epi16(x, y));
}

// Rotates the pairs of a head, eight at a time, beginning with pair `first`, until fewer than eight are left.
// `dst` may be `src`. Returns the number of the first pair that is not rotated.
template <typename Element, Pairing kPairing, Write kWrite>
FLEXKV_AVX2 int32_t turn_eights(Element* dst, const Element* src, const float* cosines, const float* sines,
                                int32_t first, int32_t half) {
  int32_t i = first;
  for (; i + kPairs <= half; i += kPairs) {
    if constexpr (kPairing == Pairing::kNeox) {
      const __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i);
      store_halves<kWrite>(dst + i, half, turn(load_halves(src + i, half), cosine, sine));
    } else {
      const __m256 cosine = angles_of_neighbours<Element>(cosines + i);
      const __m256 sine = angles_of_neighbours<Element>(sines + i);
      store_neighbours<kWrite>(dst + 2 * i, turn(load_neighbours(src + 2 * i), cosine, sine));
    }
  }
  return i;
}

}  // namespace flexkv::avx2
