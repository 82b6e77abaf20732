// Functions that copy blocks between an inference engine's pool in ordinary host memory and stripes of the
// host pool, at memory speed.
//
// Each function ends with a store fence, because it uses non-temporal stores. So other threads see the bytes
// after ordinary synchronisation with the calling thread. The caller guarantees that the memory is valid.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "layout/kv_view.h"

namespace flexkv {

// Copies one contiguous run of any alignment. Precondition: the two ranges do not overlap.
void copy_run(void* dst, const void* src, size_t bytes);

// Copies a block from the pool to `dst_stripe`, which has view.stripe_bytes() bytes. Throws BlockRangeError
// if the view has no such block.
void gather(const KvView& view, int64_t block, std::byte* dst_stripe);
// Copies a stripe to a block in the pool. Throws BlockRangeError if the view has no such block.
void scatter(const KvView& view, int64_t block, const std::byte* src_stripe);

// Do what gather() and scatter() do, but only for some segments of a view, such as those of
// view.segments_of_layers(lo, hi). (segments_of_layers() allocates memory, so callers should keep its
// result.) `dst_stripe` and `src_stripe` still point to the complete stripe. Both functions throw
// BlockRangeError if the view has no such block.
void gather_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                   std::byte* dst_stripe);
void scatter_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                    const std::byte* src_stripe);

// Do what gather() and scatter() do, for any segments. The block number is not checked.
void gather_segments(std::span<const Segment> segments, int64_t block, std::byte* dst);
void scatter_segments(std::span<const Segment> segments, int64_t block, const std::byte* src);

}  // namespace flexkv
