// Functions that compute and check the run digests in a slot of the host pool.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

// Preconditions of all functions: view.has_digests() and 0 <= lo < hi <= layers.

// Computes the digests of layers [lo, hi) from the inference engine's block and writes them into the slot.
// Precondition: the engine's pool is in ordinary host memory.
void write_digests_of_block(const AttachedView& view, int64_t block, int32_t slot, int32_t lo, int32_t hi);
// Computes the digests of layers [lo, hi) from the stripe in the slot and writes them into the slot. This is
// for callers that cannot read the inference engine's memory.
void write_digests_of_stripe(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Checks the runs of layers [lo, hi) in the slot. Returns OK, or a failure that reports the first run whose
// bytes do not match its digest.
MoveResult check_digests(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi);
// Returns the result of a page that fails because run number `run` in its slot does not match the run's
// digest.
MoveResult digest_mismatch(const AttachedView& view, size_t run, int32_t slot);

}  // namespace flexkv
