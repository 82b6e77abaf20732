// Functions that compute and check the run digests of a page in a slot of the host pool.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

// Preconditions of all functions in this file: view.has_digests() and 0 <= lo < hi <= layers.

// Computes the digests of layers [lo, hi) from the inference engine's block and writes them into the slot.
// Precondition: the inference engine's pool is in ordinary host memory.
void write_digests_of_block(const AttachedView& view, int64_t block, int32_t slot, int32_t lo, int32_t hi);
// Computes the digests of layers [lo, hi) from the stripe in the slot and writes them into the slot. This
// function is for callers that cannot read the inference engine's memory.
void write_digests_of_stripe(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Checks the runs of layers [lo, hi) in the slot. Returns OK if all bytes match their digests; otherwise a
// failure that names the first run that does not match.
MoveResult check_digests(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Returns the result for a page whose run number `run` does not match its digest. `slot`: the page's slot.
MoveResult digest_mismatch(const AttachedView& view, size_t run, int32_t slot);

}  // namespace flexkv
