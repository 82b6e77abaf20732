// Where the runs of a block lie: in the engine's pool and in the page. Compiled by g++ and nvcc alike.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// One run of every block: for block b, run_bytes bytes at base + b * block_stride, stored at page_offset in
// the stripe. All sizes are in bytes. `layer` numbers the layers of the KV group from 0; a coalesced segment
// that spans several layers carries the lowest of them.
struct Segment {
  uintptr_t base = 0;
  int64_t block_stride = 0;
  int64_t run_bytes = 0;
  int64_t page_offset = 0;
  int32_t layer = 0;

  bool operator==(const Segment&) const = default;
};

// Where a block's run lies in memory. Kernels, which have tables of their own, call this too.
FLEXKV_HD inline uintptr_t block_address(uintptr_t base, int64_t block_stride, int64_t block) {
  return base + static_cast<uintptr_t>(block * block_stride);
}

FLEXKV_HD inline uintptr_t run_address(const Segment& segment, int64_t block) {
  return block_address(segment.base, segment.block_stride, block);
}

// Whether `next` continues `segment` in memory and in the page for every block, so that both are one copy.
FLEXKV_HD inline bool continues(const Segment& segment, const Segment& next) {
  return next.block_stride == segment.block_stride &&
         next.base == segment.base + static_cast<uintptr_t>(segment.run_bytes) &&
         next.page_offset == segment.page_offset + segment.run_bytes;
}

}  // namespace flexkv
