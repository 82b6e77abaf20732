// Copies between an engine pool that is plain memory (a host device) and stripes, at memory speed.
//
// Every function returns after its bytes are visible to other threads that synchronise with this one in the
// usual way: the non-temporal stores are fenced. Block numbers are checked; the caller answers for the
// memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "layout/kv_view.h"

namespace flexkv {

// Copies one contiguous run; the ranges must not overlap. No alignment is needed.
void copy_run(void* dst, const void* src, size_t bytes);

// Pool -> stripe. `dst_stripe` has view.stripe_bytes() bytes. Throws BlockRangeError.
void gather(const KvView& view, int64_t block, std::byte* dst_stripe);
// Stripe -> pool. Throws BlockRangeError.
void scatter(const KvView& view, int64_t block, const std::byte* src_stripe);

// The same for some segments of a view, as view.segments_of_layers(lo, hi) gives them (keep them: making them
// allocates). Page offsets are still those of the whole stripe. Throws BlockRangeError for the block.
void gather_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                   std::byte* dst_stripe);
void scatter_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                    const std::byte* src_stripe);

// The same for segments that need not be a view's. Nothing is checked.
void gather_segments(std::span<const Segment> segments, int64_t block, std::byte* dst);
void scatter_segments(std::span<const Segment> segments, int64_t block, const std::byte* src);

}  // namespace flexkv
