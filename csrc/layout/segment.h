// Where the runs of a block lie in the inference engine's pool and in the page. g++ and nvcc both compile
// this file.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// One run of every block. In block b, the run has run_bytes bytes at address base + b * block_stride of the
// pool. These bytes are stored at page_offset in the stripe. All sizes are in bytes. `layer` counts the
// layers of the KV group from 0; in a coalesced segment that spans several layers, `layer` is the lowest
// number of these layers.
struct Segment {
  uintptr_t base = 0;
  int64_t block_stride = 0;
  int64_t run_bytes = 0;
  int64_t page_offset = 0;
  int32_t layer = 0;

  bool operator==(const Segment&) const = default;
};

// Returns the address of a block's run. The parameters are plain numbers because kernels call this function,
// too, and kernels have bases and strides in tables of their own instead of Segments.
FLEXKV_HD inline uintptr_t block_address(uintptr_t base, int64_t block_stride, int64_t block) {
  return base + static_cast<uintptr_t>(block * block_stride);
}

FLEXKV_HD inline uintptr_t run_address(const Segment& segment, int64_t block) {
  return block_address(segment.base, segment.block_stride, block);
}

// Whether `next` directly follows `segment`, both in memory and in the page, so that one copy can move both.
FLEXKV_HD inline bool continues(const Segment& segment, const Segment& next) {
  return next.block_stride == segment.block_stride &&
         next.base == segment.base + static_cast<uintptr_t>(segment.run_bytes) &&
         next.page_offset == segment.page_offset + segment.run_bytes;
}

}  // namespace flexkv
