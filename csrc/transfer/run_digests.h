// Computes and checks the run digests that a slot keeps beside its stripe.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

// Preconditions of all functions: view.has_digests() and 0 <= lo < hi <= layers.

// Writes the digests of layers [lo, hi) of the engine's block, which is plain memory, into the slot.
void write_digests_of_block(const AttachedView& view, int64_t block, int32_t slot, int32_t lo, int32_t hi);
// Writes the digests of layers [lo, hi) of the stripe into the slot, for callers that cannot read the
// engine's memory.
void write_digests_of_stripe(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Returns OK, or a failure that names the first run of layers [lo, hi) whose bytes in the slot do not match
// its digest.
MoveResult check_digests(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Returns the failure of a page whose run number `run` does not match its digest.
MoveResult digest_mismatch(const AttachedView& view, size_t run, int32_t slot);

}  // namespace flexkv
