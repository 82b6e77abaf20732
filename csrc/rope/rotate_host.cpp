#include <algorithm>
#include <cstring>

#include "rope/pairs_avx2.h"
#include "rope/rotate_dispatch.h"

namespace flexkv {
namespace {

// Unit: bytes. A head that goes elsewhere is turned here, in the first-level cache, and then written with
// streaming stores.
constexpr size_t kScratchBytes = 8192;
// Unit: bytes. A batch below this is likely to be read again while it is in a cache.
constexpr int64_t kStreamMinBytes = 4 << 20;

// Both ends aligned to 16 bytes.
inline void stream_out(unsigned char* dst, const unsigned char* src, size_t bytes) {
  size_t at = 0;
  for (; at + 16 <= bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(src + at)));
  }
  std::memcpy(dst + at, src + at, bytes - at);
}

// The pairs of a head from number `first` on, one by one.
template <typename Element, Pairing kPairing>
inline void turn_rest(Element* dst, const Element* src, const float* cosines, const float* sines,
                      int32_t first, int32_t half) {
  constexpr bool kHalves = kPairing == Pairing::kNeox;
  for (int32_t i = first; i < half; ++i) {
    const int32_t x = kHalves ? i : 2 * i;
    const int32_t y = kHalves ? half + i : 2 * i + 1;
    const Pair turned = turn_pair({to_float(src[x]), to_float(src[y])}, cosines[i], sines[i]);
    from_float(turned.x, dst[x]);
    from_float(turned.y, dst[y]);
  }
}

template <typename Element, Pairing kPairing>
__attribute__((target("avx2,fma,f16c"))) void turn_rows(const RotationRows& rows, bool streaming) {
  alignas(64) unsigned char scratch[kScratchBytes];
  const size_t head_bytes = sizeof(Element) * static_cast<size_t>(rows.head_dim);
  const size_t turned_bytes = sizeof(Element) * static_cast<size_t>(rows.rotary_dim);
  const int32_t half = rows.rotary_dim / 2;
  streaming = streaming && head_bytes <= kScratchBytes;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int32_t turn = rows.turn_of_row[row];
    const float* cosines = rows.turns + static_cast<int64_t>(std::max(turn, 0)) * rows.rotary_dim;
    const unsigned char* src = rows.src + rows.src_offsets[row];
    unsigned char* dst = rows.dst + rows.dst_offsets[row];
    for (int32_t head = 0; head < rows.heads;
         ++head, src += rows.src_head_stride, dst += rows.dst_head_stride) {
      if (turn == kZeroRow) {
        std::memset(dst, 0, head_bytes);
        continue;
      }
      if (turn == kCopyRow) {
        if (dst != src) std::memcpy(dst, src, head_bytes);
        continue;
      }
      const bool stream = streaming && dst != src && reinterpret_cast<uintptr_t>(dst) % 16 == 0;
      unsigned char* place = stream ? scratch : dst;
      auto* to = reinterpret_cast<Element*>(place);
      const auto* from = reinterpret_cast<const Element*>(src);
      const int32_t done = avx2::turn_eights<Element, kPairing>(to, from, cosines, cosines + half, half);
      turn_rest<Element, kPairing>(to, from, cosines, cosines + half, done, half);
      if (turned_bytes < head_bytes && place != src) {
        std::memcpy(place + turned_bytes, src + turned_bytes, head_bytes - turned_bytes);
      }
      if (stream) stream_out(dst, scratch, head_bytes);
    }
  }
  if (streaming) _mm_sfence();
}

// What turn_rows() needs of the processor.
bool is_fast() {
  static const bool fast =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return fast;
}

}  // namespace

void rotate_on_host(const RotationRows& rows, ElementType type, Pairing pairing) {
  dispatch_rotation(type, pairing, [&]<typename Kind>(Kind) {
    using Element = typename Kind::Element;
    if (is_fast()) {
      const int64_t bytes = rows.rows * rows.heads * rows.head_dim * static_cast<int64_t>(sizeof(Element));
      turn_rows<Element, Kind::kPairing>(rows, bytes >= kStreamMinBytes);
    } else {
      for (int64_t row = 0; row < rows.rows; ++row) {
        rotate_row_lane<Element, Kind::kPairing>(rows, row, 0, 1);
      }
    }
  });
}

}  // namespace flexkv
