// The arithmetic that moves cached keys to different positions: it rotates each pair of a key's elements by
// the angle that corresponds to the distance between the key's old position and its new position. g++ and
// nvcc both compile this file. rotate_kernel.cu runs rotate_row_lane() on a GPU. rotate_host.cpp vectorises
// turn_pair() or, on processors without AVX2, calls rotate_row_lane() with a single lane.
//
// There are two pairings. RoFormer (arXiv:2104.09864) and GPT-J pair neighbouring elements; GPT-NeoX pairs
// element i of the first half with element i of the second half. A rotation by (new - old) has the same
// effect as undoing the rotation to the old position and then rotating to the new position. Some models
// multiply their sines and cosines by a factor (YaRN's mscale). The rotation leaves this factor in the keys
// unchanged.
#pragma once
#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "rope/element.h"

namespace flexkv {

enum class Pairing : int32_t {
  kNeox,  // pairs elements i and i + rotary_dim / 2
  kGptj,  // pairs elements 2 i and 2 i + 1
};

// Values of turn_of_row for rows that are not rotated: kZeroRow writes zeros, kCopyRow copies the row.
inline constexpr int32_t kZeroRow = -1;
inline constexpr int32_t kCopyRow = -2;

// The rows to rotate. Each row has `heads` heads. Head h of row r is read at src + src_offsets[r] + h *
// src_head_stride and written at dst + dst_offsets[r] + h * dst_head_stride. Offsets and strides are in
// bytes, and multiples of an element's size. A *turn* consists of one angle for each pair of a head. All
// arrays are in memory that the executing processor can access. No two rows have the same destination; a row
// may be rotated in place.
struct RotationRows {
  const unsigned char* src = nullptr;
  unsigned char* dst = nullptr;
  const int64_t* src_offsets = nullptr;
  const int64_t* dst_offsets = nullptr;
  // [rows]: number of the row's turn in `turns`, or kZeroRow or kCopyRow.
  const int32_t* turn_of_row = nullptr;
  const float* turns = nullptr;  // [turns][2][rotary_dim / 2]: for each turn, its cosines, then its sines
  int64_t src_head_stride = 0;
  int64_t dst_head_stride = 0;
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;    // elements per head
  int32_t rotary_dim = 0;  // number of leading elements of a head that are rotated; even
};

struct Pair {
  float x, y;
};

// Rotates one pair. The fused multiply-adds are explicit, so that the result has the same bits with every
// compiler and on every processor.
FLEXKV_HD inline Pair turn_pair(Pair pair, float cosine, float sine) {
  return {fmaf(pair.x, cosine, -(pair.y * sine)), fmaf(pair.y, cosine, pair.x * sine)};
}

namespace rotation_detail {

// A vector of `kCount` elements, which one memory access moves.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element at[kCount];
};

// Iterates over one lane's share of a row's units, which are vectors of elements: units lane, lane + lanes,
// and so on. Each unit's head is found without a division.
struct UnitWalk {
  int32_t head = 0;
  int32_t unit;
  int32_t units;  // per head

  FLEXKV_HD UnitWalk(int lane, int32_t units_of_head) : unit(lane), units(units_of_head) { settle(); }
  FLEXKV_HD void advance(int lanes) {
    unit += lanes;
    settle();
  }

 private:
  FLEXKV_HD void settle() {
    while (unit >= units) {
      unit -= units;
      head += 1;
    }
  }
};

template <typename Element, int kCount>
FLEXKV_HD inline void copy_part(unsigned char* dst, const unsigned char* src, const RotationRows& rows,
                                int32_t first, bool zero, int lane, int lanes) {
  using Unit = Vector<Element, kCount>;
  const int32_t units = (rows.head_dim - first) / kCount;
  if (units <= 0) return;
  const auto start = static_cast<int64_t>(sizeof(Element)) * first;
  for (UnitWalk walk(lane, units); walk.head < rows.heads; walk.advance(lanes)) {
    const auto at = start + static_cast<int64_t>(sizeof(Unit)) * walk.unit;
    auto* to = reinterpret_cast<Unit*>(dst + walk.head * rows.dst_head_stride + at);
    *to = zero ? Unit{} : *reinterpret_cast<const Unit*>(src + walk.head * rows.src_head_stride + at);
  }
}

}  // namespace rotation_detail

// Whether accesses of `width` bytes (a power of two) can move rows of this geometry: all addresses, strides
// and sizes must be multiples of `width`.
template <typename Element>
FLEXKV_HD inline bool can_move_by(const RotationRows& rows, const unsigned char* dst,
                                  const unsigned char* src, int64_t width) {
  const int64_t half = static_cast<int64_t>(sizeof(Element)) * rows.rotary_dim / 2;
  const int64_t head = static_cast<int64_t>(sizeof(Element)) * rows.head_dim;
  const auto places =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src));
  return ((places | half | head | rows.src_head_stride | rows.dst_head_stride) & (width - 1)) == 0;
}

// Rotates, zeroes or copies one lane's share of a row. Each memory access moves `kCount` elements.
template <typename Element, Pairing kPairing, int kCount>
FLEXKV_HD inline void turn_row_lane(const RotationRows& rows, unsigned char* dst, const unsigned char* src,
                                    int32_t turn, int lane, int lanes) {
  namespace detail = rotation_detail;
  using Unit = detail::Vector<Element, kCount>;
  if (turn < 0) {
    detail::copy_part<Element, kCount>(dst, src, rows, 0, turn == kZeroRow, lane, lanes);
    return;
  }
  const int32_t half = rows.rotary_dim / 2;
  const float* cosines = rows.turns + static_cast<int64_t>(turn) * rows.rotary_dim;
  const float* sines = cosines + half;
  // The distance in bytes from a unit's first vector to its second vector: half of the rotated elements
  // (NeoX), or one vector (GPT-J).
  const int64_t apart = static_cast<int64_t>(sizeof(Element)) * (kPairing == Pairing::kNeox ? half : kCount);
  constexpr int64_t kStep = sizeof(Unit) * (kPairing == Pairing::kNeox ? 1 : 2);
  for (detail::UnitWalk walk(lane, half / kCount); walk.head < rows.heads; walk.advance(lanes)) {
    const unsigned char* from = src + walk.head * rows.src_head_stride + walk.unit * kStep;
    unsigned char* to = dst + walk.head * rows.dst_head_stride + walk.unit * kStep;
    Unit held[2] = {*reinterpret_cast<const Unit*>(from), *reinterpret_cast<const Unit*>(from + apart)};
    for (int k = 0; k < kCount; ++k) {
      const int first = kPairing == Pairing::kNeox ? k : 2 * k;
      const int second = kPairing == Pairing::kNeox ? kCount + k : 2 * k + 1;
      Element& x = held[first / kCount].at[first % kCount];
      Element& y = held[second / kCount].at[second % kCount];
      const int32_t pair = walk.unit * kCount + k;
      const Pair turned = turn_pair({to_float(x), to_float(y)}, cosines[pair], sines[pair]);
      from_float(turned.x, x);
      from_float(turned.y, y);
    }
    *reinterpret_cast<Unit*>(to) = held[0];
    *reinterpret_cast<Unit*>(to + apart) = held[1];
  }
  // Copies the elements that are not rotated. If the row is rotated in place, these elements are already in
  // the right place.
  if (dst != src || rows.src_head_stride != rows.dst_head_stride) {
    detail::copy_part<Element, kCount>(dst, src, rows, rows.rotary_dim, false, lane, lanes);
  }
}

// Processes one lane's share of a row that `lanes` lanes process together. If all addresses, strides and
// sizes are multiples of 16, the lane moves 16 bytes at a time. Otherwise, it moves one element at a time.
template <typename Element, Pairing kPairing>
FLEXKV_HD inline void rotate_row_lane(const RotationRows& rows, int64_t row, int lane, int lanes) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(Element));
  const unsigned char* src = rows.src + rows.src_offsets[row];
  unsigned char* dst = rows.dst + rows.dst_offsets[row];
  const int32_t turn = rows.turn_of_row[row];
  if (can_move_by<Element>(rows, dst, src, 16)) {
    turn_row_lane<Element, kPairing, kWide>(rows, dst, src, turn, lane, lanes);
  } else {
    turn_row_lane<Element, kPairing, 1>(rows, dst, src, turn, lane, lanes);
  }
}

}  // namespace flexkv
