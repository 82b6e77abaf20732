// Proves that no two blocks of a view share a byte of the pool, and that two views share them only block by
// block.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/kv_view.h"
#include "layout/segment.h"

namespace flexkv {

// Throws GeometryError naming two segments and blocks whose runs share a byte. O(n log n) for n segments of
// one stride; segments of different strides are compared where the ranges that they span meet.
void check_no_overlap(const std::vector<Segment>& segments, int64_t num_blocks);

// Throws GeometryError if block i of one view shares a byte with block j of the other, i != j. Equal blocks
// may: hybrid models let groups use the same memory, and their engine gives a block to one of them at a time.
void check_same_blocks_only(const KvView& a, const KvView& b);

}  // namespace flexkv
