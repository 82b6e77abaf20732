// Computes where a block's bytes lie in a raw file, and where they lie in the pool of a caller from outside
// flexkv.
#pragma once
#include <cstdint>
#include <span>

#include "gds/page_map.h"
#include "gds/raw/gtensor_handler.h"

namespace flexkv {

// The layout of a block in a raw file. K (kv 0) or V (kv 1) of layer l begins l * layer_stride + kv *
// kv_stride + copy_offset bytes after the block's start. All sizes and strides are in bytes.
struct RawBlockLayout {
  int64_t layer_stride = 0;
  int64_t kv_stride = 0;
  int64_t block_stride = 0;
  // Where this rank's bytes begin in a chunk (K or V of one layer) that several ranks share.
  int64_t copy_offset = 0;
  int64_t chunk_bytes = 0;  // number of bytes of one layer's K or V that are transferred
  int32_t kv_dim = 2;
  int64_t total_layers = 0;
};

// Returns a map from `layers` of a pool to a raw file. `layers` may be in any order, but may have each layer
// only once. Throws GeometryError if a size is not positive, if chunks overlap each other or go beyond their
// block, or if the pool's block stride is shorter than a chunk. Throws BlockRangeError if the pool or the
// file does not have a layer.
PageMap raw_map(const GTensorHandler& pool, const RawBlockLayout& file, std::span<const int32_t> layers);

}  // namespace flexkv
