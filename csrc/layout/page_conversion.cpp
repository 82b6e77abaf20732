#include "layout/page_conversion.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

namespace flexkv {

namespace {

constexpr int64_t kMaxStripeBytes = int64_t{1} << 40;

// Bytes of all rows; throws unless, from the smallest stride up, each one is as long as all that lies within.
int64_t dense_bytes(const RowCounts& counts, int64_t row_bytes, const RowStrides& strides) {
  std::vector<size_t> axes;
  for (size_t axis = 0; axis < kRowAxes; ++axis) {
    if (counts[axis] < 1)
      throw GeometryError("a page has " + std::to_string(counts[axis]) + " rows of an axis");
    if (counts[axis] > 1) axes.push_back(axis);  // the stride of a single one means nothing
  }
  std::sort(axes.begin(), axes.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t inside = row_bytes;
  for (const size_t axis : axes) {
    if (strides[axis] != inside) {
      throw GeometryError("axis " + std::to_string(axis) + " has stride " + std::to_string(strides[axis]) +
                          "; rows without gap or overlap need " + std::to_string(inside));
    }
    if (counts[axis] > kMaxStripeBytes / inside) throw GeometryError("a stripe of over 1 TiB");
    inside *= counts[axis];
  }
  return inside;
}

}  // namespace

PageConversion::PageConversion(const RowCounts& counts, int64_t row_bytes, const RowStrides& from,
                               const RowStrides& to)
    : counts_(counts), row_bytes_(row_bytes), from_(from), to_(to) {
  if (row_bytes < 1 || row_bytes > kMaxStripeBytes) {
    throw GeometryError("a row has " + std::to_string(row_bytes) + " bytes; allowed are 1 and more");
  }
  stripe_bytes_ = dense_bytes(counts, row_bytes, from);
  dense_bytes(counts, row_bytes, to);
}

void PageConversion::convert(const std::byte* from, std::byte* to) const {
  for (int64_t layer = 0; layer < counts_[0]; ++layer) {
    for (int64_t kv = 0; kv < counts_[1]; ++kv) {
      for (int64_t token = 0; token < counts_[2]; ++token) {
        for (int64_t head = 0; head < counts_[3]; ++head) {
          std::memcpy(to + row_offset(to_.data(), layer, kv, token, head),
                      from + row_offset(from_.data(), layer, kv, token, head),
                      static_cast<size_t>(row_bytes_));
        }
      }
    }
  }
}

}  // namespace flexkv
