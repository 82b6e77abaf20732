// Checks a rotation before a byte moves.
#pragma once
#include <cstdint>

#include "rope/rotate.h"

namespace flexkv {

// Heads, dimensions and strides. Throws GeometryError.
void check_rotation_shape(const RotationRows& rows, ElementType type);

// Every row lies inside `src_bytes` and `dst_bytes`, is aligned to its elements, names a turn that exists,
// and where source and destination share memory each row stays in its place; no cosine or sine is infinite or
// a NaN. The tables are in host memory.
// Throws GeometryError or BlockRangeError, naming the row.
void check_rotation_rows(const RotationRows& rows, ElementType type, int64_t src_bytes, int64_t dst_bytes,
                         int64_t turns);

}  // namespace flexkv
