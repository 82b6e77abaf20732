// Checks a rotation before a byte moves.
#pragma once
#include <cstdint>

#include "rope/rotate.h"

namespace flexkv {

// Checks heads, dimensions and strides. Throws GeometryError.
void check_rotation_shape(const RotationRows& rows, ElementType type);

// Checks that every row lies inside `src_bytes` and `dst_bytes`, is aligned to its element type and names a
// turn that exists; that no row moves if source and destination share memory; and that every cosine and sine
// is finite. The tables are in host memory. Throws GeometryError or BlockRangeError, which names the row.
void check_rotation_rows(const RotationRows& rows, ElementType type, int64_t src_bytes, int64_t dst_bytes,
                         int64_t turns);

}  // namespace flexkv
