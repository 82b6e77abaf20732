// Computes the digests of a stripe: one digest per run, in ascending order of page offsets.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/kv_view.h"

namespace flexkv {

// Returns one digest for each run of view.runs(). `stripe` has view.stripe_bytes() bytes. The digests do not
// depend on how the runs are coalesced into segments.
std::vector<uint64_t> page_digests(const KvView& view, const std::byte* stripe);

}  // namespace flexkv
