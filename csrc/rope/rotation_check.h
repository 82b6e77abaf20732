// Checks the arguments of a rotation, before the rotation moves any byte.
#pragma once
#include <cstdint>

#include "rope/rotate.h"

namespace flexkv {

// Checks the numbers of heads and elements, the strides, and the alignment of `src` and `dst`. Throws
// GeometryError if any of these is wrong.
void check_rotation_shape(const RotationRows& rows, ElementType type);

// Checks that every row lies inside `src_bytes` and `dst_bytes`, is aligned to its element type, and has a
// valid turn number. Also checks that every cosine and sine is finite. If source and destination share
// memory, also checks that each row is rotated in place. Precondition: the tables are in host memory. Throws
// GeometryError or BlockRangeError; the error message says which row or turn is wrong.
void check_rotation_rows(const RotationRows& rows, ElementType type, int64_t src_bytes, int64_t dst_bytes,
                         int64_t turns);

}  // namespace flexkv
