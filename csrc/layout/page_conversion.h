// Copies a stripe and changes the order of its elements. Both orders have the same elements of K and V. In
// each order, an element's offset is linear in its layer, token, head and index in the head.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// The axes of an array in this file, in this order: layers, tokens, heads, elements of a head.
inline constexpr size_t kRowAxes = 4;
using RowCounts = std::array<int64_t, kRowAxes>;
using RowStrides = std::array<int64_t, kRowAxes>;  // unit: bytes

// Where K and V of every layer, token and head lie in a stripe. K begins at byte 0 of the stripe, V at byte
// `v_offset`.
struct RowOrder {
  RowStrides k;
  RowStrides v;
  int64_t v_offset;
};

FLEXKV_HD inline int64_t row_offset(const int64_t* strides, int64_t layer, int64_t token, int64_t head) {
  return layer * strides[0] + token * strides[1] + head * strides[2];
}

class PageConversion {
 public:
  // `element_bytes` is the size of the smallest unit that the conversion copies. If a row (the elements of
  // one token and one head) is contiguous in both orders, callers pass the row as one element. Throws
  // GeometryError if the elements do not fill the stripe without gaps and overlaps in both orders. Without
  // this condition, a byte of the result could be written twice or never.
  PageConversion(const RowCounts& counts, int64_t element_bytes, const RowOrder& from, const RowOrder& to);

  int64_t stripe_bytes() const { return stripe_bytes_; }

  // Precondition: `from` and `to` have stripe_bytes() bytes each and do not overlap.
  void convert(const std::byte* from, std::byte* to) const;

 private:
  RowCounts counts_;
  int64_t element_bytes_;
  int64_t stripe_bytes_;
  RowOrder from_;
  RowOrder to_;
};

}  // namespace flexkv
