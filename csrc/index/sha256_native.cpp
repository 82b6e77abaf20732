#include "index/sha256.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "index/sha256_constants.h"

namespace flexkv {
namespace {

// The instructions keep the eight words as (a,b,e,f) and (c,d,g,h); each sha256rnds2 does two rounds.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(uint32_t* state, const uint8_t* data,
                                                                 size_t blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  auto* words = reinterpret_cast<__m128i*>(state);
  const auto* constants = reinterpret_cast<const __m128i*>(kSha256RoundConstants);

  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);

  for (; blocks > 0; --blocks, data += kSha256BlockBytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), big_endian);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i round_input = _mm_add_epi32(w[i & 3], _mm_load_si128(constants + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, round_input);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(round_input, 0x0E));
      if (i < 12) {
        __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
        w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool cpu_has_sha() {
  constexpr unsigned kShaBit = 1u << 29;  // CPUID leaf 7, EBX
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kShaBit) != 0 &&
         __builtin_cpu_supports("sse4.1");
}

}  // namespace

Sha256Compress sha256_native_compress() { return cpu_has_sha() ? compress_sha_ni : nullptr; }

}  // namespace flexkv

#else

namespace flexkv {

Sha256Compress sha256_native_compress() { return nullptr; }

}  // namespace flexkv

#endif
