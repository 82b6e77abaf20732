#include <algorithm>
#include <cstring>
#include <type_traits>

#include "rope/pairs.h"
#include "rope/pairs_avx2.h"
#include "rope/pairs_avx512.h"
#include "rope/rotate_dispatch.h"

namespace flexkv {
namespace {

// Unit: bytes. Batches of at least this size are written with stores that bypass the caches. A smaller batch
// is written through the caches, because it is probably read again while it is still in a cache.
constexpr int64_t kStreamMinBytes = 4 << 20;
// Unit: bytes. How far ahead of the rotation to prefetch, rounded up to complete rows. The hardware
// prefetcher is not enough: it restarts at each 4 KiB page, and at each row that does not follow the row
// before it in memory.
constexpr int64_t kPrefetchBytes = 8192;
// Unit: bytes. The size of a cache line.
constexpr int64_t kLineBytes = 64;

template <typename Element, Pairing kPairing, avx2::Write kWrite>
FLEXKV_AVX2 void turn_head(unsigned char* dst, const unsigned char* src, const float* cosines,
                           const RotationRows& rows, [[maybe_unused]] bool rounds_to_bfloat16) {
  const int32_t half = rows.rotary_dim / 2;
  auto* to = reinterpret_cast<Element*>(dst);
  const auto* from = reinterpret_cast<const Element*>(src);
  const float* sines = cosines + half;
  int32_t done = 0;
  if constexpr (std::is_same_v<Element, Bfloat16>) {
    constexpr bool kStreamed = kWrite == avx2::Write::kStreamed;
    if (rounds_to_bfloat16) done = avx512::turn_sixteens<kPairing>(to, from, cosines, sines, half, kStreamed);
  }
  done = avx2::turn_eights<Element, kPairing, kWrite>(to, from, cosines, sines, done, half);
  turn_pairs<Element, kPairing>(to, from, cosines, sines, done, half, half);
  const size_t turned_bytes = sizeof(Element) * static_cast<size_t>(rows.rotary_dim);
  const size_t rest_bytes = sizeof(Element) * static_cast<size_t>(rows.head_dim - rows.rotary_dim);
  if (rest_bytes == 0 || dst == src) return;
  if constexpr (kWrite == avx2::Write::kStreamed) {
    avx2::stream(dst + turned_bytes, src + turned_bytes, rest_bytes);
  } else {
    std::memcpy(dst + turned_bytes, src + turned_bytes, rest_bytes);
  }
}

// Rotates, copies or zeroes all rows. If `streaming` is set and a head's number of pairs is a multiple of
// eight, writes bypass the caches. With another number of pairs, cached and streaming stores would write to
// the same cache lines, which is slower than either kind of store alone.
template <typename Element, Pairing kPairing>
__attribute__((target("avx2,fma,f16c"))) void turn_rows(const RotationRows& rows, bool streaming) {
  using avx2::Write;
  const size_t head_bytes = sizeof(Element) * static_cast<size_t>(rows.head_dim);
  const int64_t rows_ahead = (kPrefetchBytes - 1) / (rows.heads * static_cast<int64_t>(head_bytes)) + 1;
  streaming = streaming && rows.rotary_dim / 2 % avx2::kPairs == 0;
  const bool rounds_to_bfloat16 = avx512::is_supported();
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int32_t turn = rows.turn_of_row[row];
    const float* cosines = rows.turns + static_cast<int64_t>(std::max(turn, 0)) * rows.rotary_dim;
    const unsigned char* src = rows.src + rows.src_offsets[row];
    const unsigned char* coming = rows.src + rows.src_offsets[std::min(row + rows_ahead, rows.rows - 1)];
    unsigned char* dst = rows.dst + rows.dst_offsets[row];
    for (int32_t head = 0; head < rows.heads;
         ++head, src += rows.src_head_stride, coming += rows.src_head_stride, dst += rows.dst_head_stride) {
      for (size_t at = 0; at < head_bytes; at += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(coming + at), _MM_HINT_T0);
      }
      const bool streamed =
          streaming && dst != src && reinterpret_cast<uintptr_t>(dst) % avx2::kStreamAlign == 0;
      if (turn == kZeroRow) {
        std::memset(dst, 0, head_bytes);
      } else if (turn == kCopyRow) {
        if (streamed) {
          avx2::stream(dst, src, head_bytes);
        } else if (dst != src) {
          std::memcpy(dst, src, head_bytes);
        }
      } else if (streamed) {
        turn_head<Element, kPairing, Write::kStreamed>(dst, src, cosines, rows, rounds_to_bfloat16);
      } else {
        turn_head<Element, kPairing, Write::kCached>(dst, src, cosines, rows, rounds_to_bfloat16);
      }
    }
  }
  if (streaming) _mm_sfence();
}

// Whether the processor has the instructions that turn_rows() needs.
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
