// The digests of a page: one per run, in page order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/kv_view.h"

namespace flexkv {

// Returns one digest for each of view.runs(). `stripe` has view.stripe_bytes() bytes. The digests depend on
// the runs only, not on how they coalesce to segments.
std::vector<uint64_t> page_digests(const KvView& view, const std::byte* stripe);

}  // namespace flexkv
