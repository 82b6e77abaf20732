// Copies between an engine pool that is plain memory (a host device) and stripes, at memory speed.
//
// When a function returns, its bytes are visible to threads that synchronise with this one as usual: it
// fences its non-temporal stores. Block numbers are checked; the caller guarantees that the memory is valid.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "layout/kv_view.h"

namespace flexkv {

// Copies one contiguous run; the ranges must not overlap. No alignment is needed.
void copy_run(void* dst, const void* src, size_t bytes);

// Copies pool -> stripe. `dst_stripe` has view.stripe_bytes() bytes. Throws BlockRangeError.
void gather(const KvView& view, int64_t block, std::byte* dst_stripe);
// Copies stripe -> pool. Throws BlockRangeError.
void scatter(const KvView& view, int64_t block, const std::byte* src_stripe);

// gather() and scatter() for some segments of a view, such as view.segments_of_layers(lo, hi) (which
// allocates, so keep its result). Page offsets are still those of the whole stripe. Throws BlockRangeError.
void gather_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                   std::byte* dst_stripe);
void scatter_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                    const std::byte* src_stripe);

// gather() and scatter() for any segments, without checks.
void gather_segments(std::span<const Segment> segments, int64_t block, std::byte* dst);
void scatter_segments(std::span<const Segment> segments, int64_t block, const std::byte* src);

}  // namespace flexkv
