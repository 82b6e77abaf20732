// Rotates sixteen pairs of bfloat16 at a time, on processors that have an instruction which rounds to
// bfloat16 (AVX512_BF16). (Half of the AVX2 code's work is rounding.) Results are bit-identical to those of
// turn_pair() and element.h. The instruction treats subnormal numbers as zero, so if a result is subnormal,
// its sixteen pairs are rotated one by one.
#pragma once
#include <immintrin.h>

#include "rope/pairs.h"

namespace flexkv::avx512 {

inline constexpr int kPairs = 16;

inline bool is_supported() {
  static const bool found = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return found;
}

// GCC's own headers use an uninitialised register in some of these operations, and GCC 12 warns about this.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Rotates all pairs of a head, or none if their number is not a multiple of sixteen. Returns the number of
// rotated pairs. `dst` may be `src`. If `streamed` is set, writes bypass the caches, and `dst` must be
// aligned to 32 bytes.
template <Pairing kPairing>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"), noinline)) int32_t
turn_sixteens(Bfloat16* dst, const Bfloat16* src, const float* cosines, const float* sines, int32_t half,
              bool streamed) {
  if (half % kPairs != 0) return 0;
  constexpr int kSubnormal = 0x20;
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Selects words 0, 16, 1, 17, and so on, which puts the two elements of each pair next to each other.
  const __m512i in_turns =
      _mm512_or_si512(count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(kPairs)), 16));
  for (int32_t i = 0; i < half; i += kPairs) {
    __m512i x, y;
    if constexpr (kPairing == Pairing::kNeox) {
      x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
      y = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + half + i)));
      y = _mm512_slli_epi32(y, 16);
    } else {
      x = _mm512_loadu_si512(src + 2 * i);
      y = _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
    }
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), second = _mm512_castsi512_ps(y);
    const __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i);
    const __m512 turned_first = _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine));
    const __m512 turned_second = _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine));
    if ((_mm512_fpclass_ps_mask(turned_first, kSubnormal) |
         _mm512_fpclass_ps_mask(turned_second, kSubnormal)) != 0) [[unlikely]] {
      turn_pairs<Bfloat16, kPairing>(dst, src, cosines, sines, i, i + kPairs, half);
      continue;
    }
    auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(turned_second, turned_first));
    if constexpr (kPairing == Pairing::kGptj) both = _mm512_permutexvar_epi16(in_turns, both);
    auto* low = reinterpret_cast<__m256i*>(dst + (kPairing == Pairing::kNeox ? i : 2 * i));
    auto* high = reinterpret_cast<__m256i*>(dst + (kPairing == Pairing::kNeox ? half + i : 2 * i + kPairs));
    if (streamed) {
      _mm256_stream_si256(low, _mm512_castsi512_si256(both));
      _mm256_stream_si256(high, _mm512_extracti64x4_epi64(both, 1));
    } else {
      _mm256_storeu_si256(low, _mm512_castsi512_si256(both));
      _mm256_storeu_si256(high, _mm512_extracti64x4_epi64(both, 1));
    }
  }
  return half;
}

#pragma GCC diagnostic pop

}  // namespace flexkv::avx512
