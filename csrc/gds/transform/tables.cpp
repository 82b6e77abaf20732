#include "gds/transform/tables.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace flexkv {
namespace {

TransformMode mode_of(bool into_pool, bool digests, bool in_place) {
  if (in_place) return into_pool ? TransformMode::kVerifyInPool : TransformMode::kDigestInPool;
  if (into_pool) return digests ? TransformMode::kToPoolVerified : TransformMode::kToPool;
  return digests ? TransformMode::kToSlotDigested : TransformMode::kToSlot;
}

}  // namespace

TransformTables::TransformTables(const PageMap& map, bool into_pool)
    : digest_offset(map.digest_offset()), mode(mode_of(into_pool, map.has_digests(), map.in_place())) {
  // Each run has a digest of its own. Without digests, contiguous runs are moved as one segment.
  for (const Segment& run : map.has_digests() ? map.runs() : map.segments()) {
    const int64_t count = (run.run_bytes + kLeafBytes - 1) / kLeafBytes;
    if (count + static_cast<int64_t>(leaves.size()) > INT32_MAX) {
      throw GeometryError("a page of more than " + std::to_string(INT32_MAX) + " leaves of 4 KiB");
    }
    const auto number = static_cast<int32_t>(runs.size());
    runs.push_back({run.base, run.block_stride, run.page_offset, run.run_bytes, count});
    for (int64_t index = 0; index < count; ++index) {
      const int64_t bytes = std::min(kLeafBytes, run.run_bytes - index * kLeafBytes);
      leaves.push_back({number, static_cast<int32_t>(bytes), index});
    }
  }
}

TransformBatch host_batch(const TransformTables& tables) {
  TransformBatch batch;
  batch.runs = tables.runs.data();
  batch.leaves = tables.leaves.data();
  batch.digest_offset = tables.digest_offset;
  batch.num_runs = static_cast<int32_t>(tables.runs.size());
  batch.num_leaves = static_cast<int32_t>(tables.leaves.size());
  batch.mode = tables.mode;
  return batch;
}

}  // namespace flexkv
