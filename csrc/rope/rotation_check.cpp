#include "rope/rotation_check.h"

#include <cmath>
#include <string>

#include "base/error.h"

namespace flexkv {
namespace {

// Unit: bytes. The maximum size of a row. A larger row is a mistake by the caller. Below this limit, sums
// cannot overflow.
constexpr int64_t kMostRowBytes = int64_t{1} << 56;

void require(bool holds, const std::string& message) {
  if (!holds) throw GeometryError(message);
}

struct Region {
  const char* name;
  const int64_t* offsets;
  int64_t bytes, row_bytes, element;
};

// Checks that a row lies inside its region and is aligned. Builds the error message only when it throws,
// because this function is called for every row of every layer.
void check_row(const Region& region, int64_t row) {
  const int64_t offset = region.offsets[row];
  if (offset < 0 || offset > region.bytes - region.row_bytes) {
    throw BlockRangeError("row " + std::to_string(row) + " of " + std::to_string(region.row_bytes) +
                          " bytes at byte " + std::to_string(offset) + " of " + region.name + ", which has " +
                          std::to_string(region.bytes));
  }
  if (offset % region.element != 0) {
    throw GeometryError("row " + std::to_string(row) + " starts at byte " + std::to_string(offset) + " of " +
                        region.name + ": elements have " + std::to_string(region.element) + " bytes");
  }
}

// Rejects cosines and sines that are NaN or infinite: the rotated keys would be NaN or infinite, with
// different bits on different processors.
void check_turns(const RotationRows& rows, int64_t turns) {
  const int64_t count = turns * rows.rotary_dim;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= std::isfinite(rows.turns[i]);
  if (finite) return;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(rows.turns[i])) continue;
    throw GeometryError("turn " + std::to_string(i / rows.rotary_dim) + " has a " +
                        std::to_string(rows.turns[i]) + " among its cosines and sines; all must be finite");
  }
}

}  // namespace

void check_rotation_shape(const RotationRows& rows, ElementType type) {
  const int64_t element = element_bytes(type);
  require(rows.heads > 0 && rows.head_dim > 0, std::to_string(rows.heads) + " heads of " +
                                                   std::to_string(rows.head_dim) +
                                                   " elements: both must be at least 1");
  require(rows.rotary_dim > 0 && rows.rotary_dim % 2 == 0 && rows.rotary_dim <= rows.head_dim,
          "rotary_dim " + std::to_string(rows.rotary_dim) + ": even and from 2 to head_dim, which is " +
              std::to_string(rows.head_dim));
  for (const int64_t stride : {rows.src_head_stride, rows.dst_head_stride}) {
    require(rows.heads == 1 || (stride >= element * rows.head_dim && stride % element == 0),
            "a head stride of " + std::to_string(stride) +
                " bytes: a multiple of an element and at least a head, " +
                std::to_string(element * rows.head_dim));
    require(rows.heads == 1 || stride <= kMostRowBytes / rows.heads,
            std::to_string(rows.heads) + " heads with a stride of " + std::to_string(stride) +
                " bytes: a row has at most " + std::to_string(kMostRowBytes));
  }
  for (const unsigned char* base : {rows.src, static_cast<const unsigned char*>(rows.dst)}) {
    require(reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(element) == 0,
            "the keys are not aligned to their elements");
  }
}

void check_rotation_rows(const RotationRows& rows, ElementType type, int64_t src_bytes, int64_t dst_bytes,
                         int64_t turns) {
  const int64_t element = element_bytes(type);
  const auto row_bytes = [&](int64_t stride) { return (rows.heads - 1) * stride + rows.head_dim * element; };
  const Region src{"the source", rows.src_offsets, src_bytes, row_bytes(rows.src_head_stride), element};
  const Region dst{"the destination", rows.dst_offsets, dst_bytes, row_bytes(rows.dst_head_stride), element};
  check_turns(rows, turns);
  const bool apart = rows.dst + dst_bytes <= rows.src || rows.src + src_bytes <= rows.dst;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int32_t turn = rows.turn_of_row[row];
    if (turn < kCopyRow || turn >= turns) {
      throw BlockRangeError("row " + std::to_string(row) + " takes turn " + std::to_string(turn) +
                            ": allowed are " + std::to_string(kCopyRow) + " to " + std::to_string(turns - 1));
    }
    if (turn != kZeroRow) check_row(src, row);
    check_row(dst, row);
    const bool stays = rows.src + rows.src_offsets[row] == rows.dst + rows.dst_offsets[row] &&
                       (rows.heads == 1 || rows.src_head_stride == rows.dst_head_stride);
    if (!apart && !stays) {
      throw GeometryError("row " + std::to_string(row) +
                          ": source and destination share memory, so each row must stay in its place");
    }
  }
}

}  // namespace flexkv
