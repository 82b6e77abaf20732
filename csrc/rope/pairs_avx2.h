// Eight pairs at a time: loading them from either pairing, turning them, storing them. The same bits as
// turn_pair() and the conversions of element.h give.
#pragma once
#include <immintrin.h>

#include "rope/rotation.h"

#define FLEXKV_AVX2 __attribute__((target("avx2,fma,f16c"), always_inline)) inline

namespace flexkv::avx2 {

inline constexpr int kPairs = 8;

struct Pairs {
  __m256 x, y;
};

// turn_pair() of eight pairs: fmsub is the fused operation with the product negated.
FLEXKV_AVX2 Pairs turn(const Pairs& pairs, __m256 cosines, __m256 sines) {
  return {_mm256_fmsub_ps(pairs.x, cosines, _mm256_mul_ps(pairs.y, sines)),
          _mm256_fmadd_ps(pairs.y, cosines, _mm256_mul_ps(pairs.x, sines))};
}

FLEXKV_AVX2 __m256i load_bits(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
FLEXKV_AVX2 __m256i widen(const void* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
// The low 16 bits of each of the eight, which hold nothing else.
FLEXKV_AVX2 __m128i narrow(__m256i values) {
  const __m256i packed = _mm256_packus_epi32(values, values);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

FLEXKV_AVX2 __m256i bfloat16_bits(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), quiet, is_nan);
}
FLEXKV_AVX2 __m128i float16_bits(__m256 value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }

// --- eight elements that follow each other ---

FLEXKV_AVX2 __m256 load(const float* from) { return _mm256_loadu_ps(from); }
FLEXKV_AVX2 __m256 load(const Bfloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(widen(from), 16));
}
FLEXKV_AVX2 __m256 load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
FLEXKV_AVX2 void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
FLEXKV_AVX2 void store(Bfloat16* to, __m256 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(bfloat16_bits(value)));
}
FLEXKV_AVX2 void store(Float16* to, __m256 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), float16_bits(value));
}

// --- eight pairs of neighbours ---

FLEXKV_AVX2 __m256 quarters_in_order(__m256 mixed) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xD8));
}
FLEXKV_AVX2 Pairs load_neighbours(const float* from) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + kPairs);
  return {quarters_in_order(_mm256_shuffle_ps(a, b, 0x88)), quarters_in_order(_mm256_shuffle_ps(a, b, 0xDD))};
}
FLEXKV_AVX2 Pairs load_neighbours(const Bfloat16* from) {
  const __m256i both = load_bits(from);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, high))};
}
FLEXKV_AVX2 Pairs load_neighbours(const Float16* from) {
  const __m256i both = load_bits(from);
  return {_mm256_cvtph_ps(narrow(_mm256_and_si256(both, _mm256_set1_epi32(0xFFFF)))),
          _mm256_cvtph_ps(narrow(_mm256_srli_epi32(both, 16)))};
}
FLEXKV_AVX2 void store_neighbours(float* to, const Pairs& pairs) {
  const __m256 low = _mm256_unpacklo_ps(pairs.x, pairs.y), high = _mm256_unpackhi_ps(pairs.x, pairs.y);
  _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(to + kPairs, _mm256_permute2f128_ps(low, high, 0x31));
}
FLEXKV_AVX2 void store_bits(void* to, __m256i x, __m256i y) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_or_si256(x, _mm256_slli_epi32(y, 16)));
}
FLEXKV_AVX2 void store_neighbours(Bfloat16* to, const Pairs& pairs) {
  store_bits(to, bfloat16_bits(pairs.x), bfloat16_bits(pairs.y));
}
FLEXKV_AVX2 void store_neighbours(Float16* to, const Pairs& pairs) {
  store_bits(to, _mm256_cvtepu16_epi32(float16_bits(pairs.x)), _mm256_cvtepu16_epi32(float16_bits(pairs.y)));
}

// The first pairs of a head, as many as come in eights; returns how many. In place or elsewhere.
template <typename Element, Pairing kPairing>
FLEXKV_AVX2 int32_t turn_eights(Element* dst, const Element* src, const float* cosines, const float* sines,
                                int32_t half) {
  int32_t i = 0;
  for (; i + kPairs <= half; i += kPairs) {
    const __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i);
    if constexpr (kPairing == Pairing::kNeox) {
      const Pairs turned = turn({load(src + i), load(src + half + i)}, cosine, sine);
      store(dst + i, turned.x);
      store(dst + half + i, turned.y);
    } else {
      store_neighbours(dst + 2 * i, turn(load_neighbours(src + 2 * i), cosine, sine));
    }
  }
  return i;
}

}  // namespace flexkv::avx2
