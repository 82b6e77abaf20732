// The work of one thread of a group of `lanes` threads (a warp) on a run: copying it, and digesting its
// leaves. Compiled by g++ and nvcc alike; csrc/layout/lane_executor.h runs it on the CPU one lane after the
// other.
#pragma once
#include <cstdint>

#include "base/digest.h"
#include "base/host_device.h"

namespace flexkv {

// A vector register's worth, copied in one instruction by a GPU thread.
struct alignas(16) Vector16 {
  uint64_t low, high;
};

// Copies what falls to `lane`: 16-byte vectors where both ends allow it, single bytes for the rest, so that
// no tail is lost whatever the size and alignment.
FLEXKV_HD inline void copy_lane(unsigned char* dst, const unsigned char* src, int64_t bytes, int lane,
                                int lanes) {
  int64_t done = 0;
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & 15u) == 0) {
    const int64_t vectors = bytes / 16;
    auto* to = reinterpret_cast<Vector16*>(dst);
    const auto* from = reinterpret_cast<const Vector16*>(src);
    for (int64_t i = lane; i < vectors; i += lanes) to[i] = from[i];
    done = vectors * 16;
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

// The sums of the words lane, lane + lanes, ... of a leaf. With `lanes` a multiple of kDigestLanes these all
// belong to digest lane `lane % kDigestLanes`: add up the sums of equal ones (shuffles), fold each, and add
// the folds.
FLEXKV_HD inline LaneSums leaf_lane(const unsigned char* leaf, int64_t bytes, int lane, int lanes) {
  LaneSums sums;
  for (int64_t word = lane; word * 8 < bytes; word += lanes) {
    sums.add(load_word(leaf, bytes, word), digest_constant(static_cast<uint64_t>(word)));
  }
  return sums;
}

}  // namespace flexkv
