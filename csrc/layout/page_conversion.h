// Rewrites a stripe from one interior order into another: both are the same rows (K or V of one token and
// head), each at an offset that is linear in layer, K or V, token and head.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// Layers, K and V, tokens, heads: in this order everywhere below.
inline constexpr size_t kRowAxes = 4;
using RowCounts = std::array<int64_t, kRowAxes>;
using RowStrides = std::array<int64_t, kRowAxes>;  // bytes

FLEXKV_HD inline int64_t row_offset(const int64_t* strides, int64_t layer, int64_t kv, int64_t token,
                                    int64_t head) {
  return layer * strides[0] + kv * strides[1] + token * strides[2] + head * strides[3];
}

class PageConversion {
 public:
  // Throws GeometryError unless both strides lay all rows side by side without gap or overlap: only then is
  // every byte of the result written, and from one place.
  PageConversion(const RowCounts& counts, int64_t row_bytes, const RowStrides& from, const RowStrides& to);

  int64_t stripe_bytes() const { return stripe_bytes_; }

  // `from` and `to` hold stripe_bytes() each and do not overlap.
  void convert(const std::byte* from, std::byte* to) const;

 private:
  RowCounts counts_;
  int64_t row_bytes_;
  RowStrides from_;
  RowStrides to_;
  int64_t stripe_bytes_;
};

}  // namespace flexkv
