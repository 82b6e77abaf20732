// Where a block's bytes lie in a raw file and in the pool of an outside caller.
#pragma once
#include <cstdint>
#include <span>

#include "gds/page_map.h"
#include "gds/raw/gtensor_handler.h"

namespace flexkv {

// The layout of a block in a raw file, in bytes from the block's place: layer l's K (kv 0) or V (kv 1) starts
// at l * layer_stride + kv * kv_stride + copy_offset.
struct RawBlockLayout {
  int64_t layer_stride = 0;
  int64_t kv_stride = 0;
  int64_t block_stride = 0;
  int64_t copy_offset = 0;  // start of this rank's part in a chunk that several ranks share
  int64_t chunk_bytes = 0;  // how much of one layer's K or V moves
  int32_t kv_dim = 2;
  int64_t total_layers = 0;
};

// Maps `layers` (any order, each once) of a pool to a raw file. Throws GeometryError for sizes that are not
// positive, chunks that overlap each other or leave their block, or pool strides shorter than a chunk;
// BlockRangeError for layers outside the pool or the file.
PageMap raw_map(const GTensorHandler& pool, const RawBlockLayout& file, std::span<const int32_t> layers);

}  // namespace flexkv
