#include "layout/page_conversion.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

namespace flexkv {

namespace {

constexpr int64_t kMaxStripeBytes = int64_t{1} << 40;
// Unit: elements of K and V together. The maximum number of elements in a stripe. The check of a conversion
// marks each element, which takes one bit of memory and some nanoseconds per element. A page of 80 layers,
// 256 tokens and 8 heads of 128 elements has 42 million elements.
constexpr int64_t kMostElements = int64_t{1} << 28;

int64_t stripe_bytes_of(const RowCounts& counts, int64_t element_bytes) {
  if (element_bytes < 1 || element_bytes > kMaxStripeBytes / 2) {
    throw GeometryError("an element has " + std::to_string(element_bytes) + " bytes; allowed are 1 and more");
  }
  int64_t bytes = 2 * element_bytes;
  for (const int64_t count : counts) {
    if (count < 1) throw GeometryError("a page has " + std::to_string(count) + " of an axis");
    if (count > kMaxStripeBytes / bytes) throw GeometryError("a stripe of over 1 TiB");
    bytes *= count;
  }
  if (bytes / element_bytes > kMostElements) {
    throw GeometryError("a page of " + std::to_string(bytes / element_bytes) +
                        " elements; allowed are up to " + std::to_string(kMostElements));
  }
  return bytes;
}

// Throws GeometryError if the steps along an axis lead out of the stripe. This check comes before all others,
// because sums of steps that are too large could overflow.
void require_steps(const RowCounts& counts, const RowOrder& order, int64_t stripe_bytes) {
  const auto require = [&](const std::string& name, int64_t bytes, int64_t steps) {
    const int64_t most = stripe_bytes / std::max<int64_t>(1, steps);
    if (bytes >= -most && bytes <= most) return;
    throw GeometryError(name + " is " + std::to_string(bytes) + " bytes: allowed are up to " +
                        std::to_string(most) + ", as the stripe has " + std::to_string(stripe_bytes));
  };
  for (size_t axis = 0; axis < kRowAxes; ++axis) {
    require("K's step on axis " + std::to_string(axis), order.k[axis], counts[axis] - 1);
    require("V's step on axis " + std::to_string(axis), order.v[axis], counts[axis] - 1);
  }
  require("the start of V", order.v_offset, 1);
}

// Throws GeometryError if the elements do not fill the stripe without gaps and overlaps. Marks the position
// of each element. The stripe has as many positions as there are elements, so if no position is marked twice,
// all positions are marked.
void require_dense(const RowCounts& counts, int64_t element_bytes, int64_t stripe_bytes,
                   const RowOrder& order) {
  require_steps(counts, order, stripe_bytes);
  std::vector<bool> taken(static_cast<size_t>(stripe_bytes / element_bytes));
  for (const bool value : {false, true}) {
    const int64_t* strides = value ? order.v.data() : order.k.data();
    for (int64_t layer = 0; layer < counts[0]; ++layer) {
      for (int64_t token = 0; token < counts[1]; ++token) {
        for (int64_t head = 0; head < counts[2]; ++head) {
          int64_t offset = (value ? order.v_offset : 0) + row_offset(strides, layer, token, head);
          for (int64_t element = 0; element < counts[3]; ++element, offset += strides[3]) {
            const bool inside =
                offset >= 0 && offset <= stripe_bytes - element_bytes && offset % element_bytes == 0;
            if (!inside || taken[static_cast<size_t>(offset / element_bytes)]) {
              throw GeometryError(
                  "an element of layer " + std::to_string(layer) + ", token " + std::to_string(token) +
                  ", head " + std::to_string(head) + " lies at byte " + std::to_string(offset) + " of " +
                  std::to_string(stripe_bytes) + ": elements without gap or overlap are needed");
            }
            taken[static_cast<size_t>(offset / element_bytes)] = true;
          }
        }
      }
    }
  }
}

void move_row(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t elements,
              int64_t bytes) {
  if (elements == 1 || (from_stride == bytes && to_stride == bytes)) {
    std::memcpy(to, from, static_cast<size_t>(elements * bytes));
    return;
  }
  for (int64_t element = 0; element < elements; ++element) {
    std::memcpy(to + element * to_stride, from + element * from_stride, static_cast<size_t>(bytes));
  }
}

}  // namespace

PageConversion::PageConversion(const RowCounts& counts, int64_t element_bytes, const RowOrder& from,
                               const RowOrder& to)
    : counts_(counts),
      element_bytes_(element_bytes),
      stripe_bytes_(stripe_bytes_of(counts, element_bytes)),
      from_(from),
      to_(to) {
  require_dense(counts, element_bytes, stripe_bytes_, from);
  require_dense(counts, element_bytes, stripe_bytes_, to);
}

void PageConversion::convert(const std::byte* from, std::byte* to) const {
  for (const bool value : {false, true}) {
    const RowStrides& source = value ? from_.v : from_.k;
    const RowStrides& target = value ? to_.v : to_.k;
    const std::byte* const read = from + (value ? from_.v_offset : 0);
    std::byte* const written = to + (value ? to_.v_offset : 0);
    for (int64_t layer = 0; layer < counts_[0]; ++layer) {
      for (int64_t token = 0; token < counts_[1]; ++token) {
        for (int64_t head = 0; head < counts_[2]; ++head) {
          move_row(read + row_offset(source.data(), layer, token, head), source[3],
                   written + row_offset(target.data(), layer, token, head), target[3], counts_[3],
                   element_bytes_);
        }
      }
    }
  }
}

}  // namespace flexkv
