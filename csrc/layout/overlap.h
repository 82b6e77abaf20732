// Proves that no two blocks of a view share a byte of the pool.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/segment.h"

namespace flexkv {

// Throws GeometryError naming two segments and blocks whose runs share a byte.
void check_no_overlap(const std::vector<Segment>& segments, int64_t num_blocks);

}  // namespace flexkv
