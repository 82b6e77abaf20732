// Checks that no two blocks of a view share a byte of the pool, and that two views share bytes only between
// equal block numbers.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/kv_view.h"
#include "layout/segment.h"

namespace flexkv {

// Throws GeometryError if two runs of any blocks share a byte; the error message names the two segments and
// blocks. If all n segments have the same stride, this takes O(n log n) time. Segments of different strides
// are compared pair by pair if their address ranges overlap.
void check_no_overlap(const std::vector<Segment>& segments, int64_t num_blocks);

// Throws GeometryError if block i of one view shares a byte with block j of the other view, where i != j.
// Equal block numbers may share bytes: the KV groups of a hybrid model use the same memory, and the inference
// engine gives each block to one group at a time.
void check_same_blocks_only(const KvView& a, const KvView& b);

}  // namespace flexkv
