#include "index/sha256.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "index/sha256_constants.h"

namespace flexkv {
namespace {

#define FLEXKV_SHA_NI __attribute__((target("sha,sse4.1,ssse3")))
#define FLEXKV_SHA_NI_INLINE FLEXKV_SHA_NI __attribute__((always_inline)) inline

// The state of one hash. The SHA instructions expect its eight words as (a,b,e,f) and (c,d,g,h). Each
// sha256rnds2 instruction computes two rounds.
struct Lane {
  __m128i abef;
  __m128i cdgh;
  __m128i w[4];  // the message schedule
};

FLEXKV_SHA_NI_INLINE Lane lane_of(const uint32_t* state) {
  const auto* words = reinterpret_cast<const __m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  return {_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xF0), {}};
}

FLEXKV_SHA_NI_INLINE void store(const Lane& lane, uint32_t* state) {
  auto* words = reinterpret_cast<__m128i*>(state);
  const __m128i feba = _mm_shuffle_epi32(lane.abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(lane.cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

FLEXKV_SHA_NI_INLINE void load_block(Lane& lane, const uint8_t* data) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  for (int i = 0; i < 4; ++i) {
    lane.w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), big_endian);
  }
}

// Computes rounds 4i to 4i + 3, and the schedule words that later rounds need.
FLEXKV_SHA_NI_INLINE void four_rounds(Lane& lane, int i) {
  __m128i* const w = lane.w;
  const auto* constants = reinterpret_cast<const __m128i*>(kSha256RoundConstants);
  const __m128i round_input = _mm_add_epi32(w[i & 3], _mm_load_si128(constants + i));
  lane.cdgh = _mm_sha256rnds2_epu32(lane.cdgh, lane.abef, round_input);
  lane.abef = _mm_sha256rnds2_epu32(lane.abef, lane.cdgh, _mm_shuffle_epi32(round_input, 0x0E));
  if (i < 12) {
    __m128i next = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
    next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
    w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
  }
}

FLEXKV_SHA_NI_INLINE void add(Lane& lane, const Lane& before) {
  lane.abef = _mm_add_epi32(lane.abef, before.abef);
  lane.cdgh = _mm_add_epi32(lane.cdgh, before.cdgh);
}

FLEXKV_SHA_NI void compress_sha_ni(uint32_t* state, const uint8_t* data, size_t blocks) {
  Lane lane = lane_of(state);
  for (; blocks > 0; --blocks, data += kSha256BlockBytes) {
    const Lane before = lane;
    load_block(lane, data);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) four_rounds(lane, i);
    add(lane, before);
  }
  store(lane, state);
}

// Compresses one block of each of two messages. The rounds of one hash depend on each other, but the CPU can
// overlap the rounds of one hash with the rounds of the other hash.
FLEXKV_SHA_NI void compress_pair_sha_ni(uint32_t* first, const uint8_t* first_block, uint32_t* second,
                                        const uint8_t* second_block) {
  const Lane first_before = lane_of(first);
  const Lane second_before = lane_of(second);
  Lane one = first_before;
  Lane two = second_before;
  load_block(one, first_block);
  load_block(two, second_block);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    four_rounds(one, i);
    four_rounds(two, i);
  }
  add(one, first_before);
  add(two, second_before);
  store(one, first);
  store(two, second);
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
Sha256CompressPair sha256_native_compress_pair() { return cpu_has_sha() ? compress_pair_sha_ni : nullptr; }

}  // namespace flexkv

#undef FLEXKV_SHA_NI_INLINE
#undef FLEXKV_SHA_NI

#else

namespace flexkv {

Sha256Compress sha256_native_compress() { return nullptr; }
Sha256CompressPair sha256_native_compress_pair() { return nullptr; }

}  // namespace flexkv

#endif
