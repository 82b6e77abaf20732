// The digests of a page: one per run, in page order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/kv_view.h"

namespace flexkv {

// One digest for each of view.runs(). `stripe` has view.stripe_bytes() bytes. Views with other segments but
// the same runs give the same digests.
std::vector<uint64_t> page_digests(const KvView& view, const std::byte* stripe);

}  // namespace flexkv
