// The work of one thread (a lane) in a group of `lanes` threads (a warp). The lane copies its share of a run,
// and sums up its share of the words of a digest leaf. g++ and nvcc both compile this file.
// csrc/testing/layout_lanes.h runs the lanes one after another on the CPU.
#pragma once
#include <cstdint>

#include "base/digest.h"
#include "base/host_device.h"

namespace flexkv {

// The word types that a GPU thread can copy with one instruction, the widest first.
struct alignas(16) Vector16 {
  uint64_t low, high;
};
struct alignas(8) Vector8 {
  uint64_t word;
};
struct alignas(4) Vector4 {
  uint32_t word;
};

// How many loads a thread issues before its first store. A load over PCIe takes about a microsecond, so a
// warp that waited for each load would move only 0.5 GB/s.
inline constexpr int kLoadsInFlight = 4;

// Whether both addresses are multiples of `width`, a power of two, so that accesses of `width` bytes are
// aligned.
FLEXKV_HD inline bool aligned_for(const void* a, const void* b, uintptr_t width) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & (width - 1)) == 0;
}

// Copies one lane's share of the complete words of a run: words lane, lane + lanes, and so on. Returns how
// many bytes all lanes together copy.
template <typename Word, int kInFlight>
FLEXKV_HD inline int64_t copy_words(unsigned char* dst, const unsigned char* src, int64_t bytes, int lane,
                                    int lanes) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  auto* to = reinterpret_cast<Word*>(dst);
  const auto* from = reinterpret_cast<const Word*>(src);
  int64_t i = lane;
  for (; i + (kInFlight - 1) * lanes < words; i += kInFlight * lanes) {
    Word held[kInFlight];
    for (int k = 0; k < kInFlight; ++k) held[k] = from[i + k * lanes];
    for (int k = 0; k < kInFlight; ++k) to[i + k * lanes] = held[k];
  }
  for (; i < words; i += lanes) to[i] = from[i];
  return words * static_cast<int64_t>(sizeof(Word));
}

// Copies one lane's share of a run of any size and alignment. The lanes copy the widest words that the
// alignment of both addresses allows. A tail follows: at most one word of 8 bytes, one word of 4 bytes, and
// single bytes.
template <int kInFlight = kLoadsInFlight>
FLEXKV_HD inline void copy_lane(unsigned char* dst, const unsigned char* src, int64_t bytes, int lane,
                                int lanes) {
  int64_t done = 0;
  if (aligned_for(dst, src, 16)) {
    done = copy_words<Vector16, kInFlight>(dst, src, bytes, lane, lanes);
  } else if (aligned_for(dst, src, 8)) {
    done = copy_words<Vector8, kInFlight>(dst, src, bytes, lane, lanes);
  } else if (aligned_for(dst, src, 4)) {
    done = copy_words<Vector4, kInFlight>(dst, src, bytes, lane, lanes);
  }
  if (bytes - done >= 8 && aligned_for(dst, src, 8)) {
    if (lane == 0) copy_words<Vector8, kInFlight>(dst + done, src + done, 8, 0, 1);
    done += 8;
  }
  if (bytes - done >= 4 && aligned_for(dst, src, 4)) {
    if (lane == lanes - 1) copy_words<Vector4, kInFlight>(dst + done, src + done, 4, 0, 1);
    done += 4;
  }
  for (int64_t i = done + lane; i < bytes; i += lanes) dst[i] = src[i];
}

FLEXKV_HD inline uint64_t load_word(const unsigned char* leaf, int64_t bytes, int64_t word) {
  const unsigned char* at = leaf + word * 8;
  if (word * 8 + 8 <= bytes && (reinterpret_cast<uintptr_t>(at) & 7u) == 0) {
    return *reinterpret_cast<const uint64_t*>(at);
  }
  uint64_t value = 0;
  for (int64_t i = 0; i < 8 && word * 8 + i < bytes; ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return value;
}

// Returns one lane's sums over the words of a leaf: words lane, lane + lanes, and so on. If `lanes` is a
// multiple of kDigestLanes, all these words belong to digest lane `lane % kDigestLanes`. The caller then adds
// up the sums of threads with the same digest lane, folds the sums of each digest lane, and adds up the
// results.
FLEXKV_HD inline LaneSums leaf_lane(const unsigned char* leaf, int64_t bytes, int lane, int lanes) {
  LaneSums sums;
  for (int64_t word = lane; word * 8 < bytes; word += lanes) {
    sums.add(load_word(leaf, bytes, word), digest_constant(static_cast<uint64_t>(word)));
  }
  return sums;
}

}  // namespace flexkv
