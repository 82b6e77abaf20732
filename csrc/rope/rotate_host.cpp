#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "rope/rotate.h"

namespace flexkv {
namespace {

// Unit: bytes. A head that goes elsewhere is turned here, in the first-level cache, and then written with
// streaming stores.
constexpr size_t kScratchBytes = 8192;
// Unit: bytes. A batch below this is likely to be read again while it is in a cache.
constexpr int64_t kStreamMinBytes = 4 << 20;

template <typename Element, Pairing kPairing>
__attribute__((always_inline)) inline void turn_head(Element* dst, const Element* src, const float* cosines,
                                                     const float* sines, int32_t half) {
  const int32_t apart = kPairing == Pairing::kNeox ? half : 1;
  constexpr int32_t kStep = kPairing == Pairing::kNeox ? 1 : 2;
  // In place each pair is read before it is written, and pairs share no element.
#pragma GCC ivdep
  for (int32_t i = 0; i < half; ++i) {
    const int32_t x = i * kStep;
    const int32_t y = x + apart;
    const Pair turned = turn_pair({to_float(src[x]), to_float(src[y])}, cosines[i], sines[i]);
    from_float(turned.x, dst[x]);
    from_float(turned.y, dst[y]);
  }
}

// Both ends aligned to 16 bytes.
inline void stream_out(unsigned char* dst, const unsigned char* src, size_t bytes) {
  size_t at = 0;
  for (; at + 16 <= bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(src + at)));
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

template <typename Element, Pairing kPairing, bool kStream>
__attribute__((always_inline)) inline void turn_rows(const RotationRows& rows) {
  alignas(64) unsigned char scratch[kScratchBytes];
  const size_t head_bytes = sizeof(Element) * static_cast<size_t>(rows.head_dim);
  const size_t turned_bytes = sizeof(Element) * static_cast<size_t>(rows.rotary_dim);
  const int32_t half = rows.rotary_dim / 2;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int32_t turn = rows.turn_of_row[row];
    const float* cosines = rows.turns + static_cast<int64_t>(std::max(turn, 0)) * rows.rotary_dim;
    for (int32_t head = 0; head < rows.heads; ++head) {
      const unsigned char* src = rows.src + rows.src_offsets[row] + head * rows.src_head_stride;
      unsigned char* dst = rows.dst + rows.dst_offsets[row] + head * rows.dst_head_stride;
      if (turn == kZeroRow) {
        std::memset(dst, 0, head_bytes);
        continue;
      }
      if (turn == kCopyRow) {
        if (dst != src) std::memcpy(dst, src, head_bytes);
        continue;
      }
      const bool stream =
          kStream && dst != src && head_bytes <= kScratchBytes && reinterpret_cast<uintptr_t>(dst) % 16 == 0;
      unsigned char* to = stream ? scratch : dst;
      turn_head<Element, kPairing>(reinterpret_cast<Element*>(to), reinterpret_cast<const Element*>(src),
                                   cosines, cosines + half, half);
      if (turned_bytes < head_bytes && to != src) {
        std::memcpy(to + turned_bytes, src + turned_bytes, head_bytes - turned_bytes);
      }
      if constexpr (kStream) {
        if (stream) stream_out(dst, scratch, head_bytes);
      }
    }
  }
  if constexpr (kStream) _mm_sfence();
}

template <typename Element, Pairing kPairing, bool kStream>
__attribute__((target("avx2,fma"))) void turn_rows_avx2(const RotationRows& rows) {
  turn_rows<Element, kPairing, kStream>(rows);
}

template <typename Element, Pairing kPairing>
void run(const RotationRows& rows) {
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const int64_t bytes = rows.rows * rows.heads * rows.head_dim * static_cast<int64_t>(sizeof(Element));
  if (!fast) {
    turn_rows<Element, kPairing, false>(rows);
  } else if (bytes < kStreamMinBytes) {
    turn_rows_avx2<Element, kPairing, false>(rows);
  } else {
    turn_rows_avx2<Element, kPairing, true>(rows);
  }
}

template <typename Element>
void run(const RotationRows& rows, Pairing pairing) {
  if (pairing == Pairing::kNeox) {
    run<Element, Pairing::kNeox>(rows);
  } else {
    run<Element, Pairing::kGptj>(rows);
  }
}

}  // namespace

void rotate_on_host(const RotationRows& rows, ElementType type, Pairing pairing) {
  switch (type) {
    case ElementType::kFloat32:
      return run<float>(rows, pairing);
    case ElementType::kBfloat16:
      return run<Bfloat16>(rows, pairing);
    case ElementType::kFloat16:
      return run<Float16>(rows, pairing);
  }
}

}  // namespace flexkv
