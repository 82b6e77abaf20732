// The memory that the ops of one KV group copy from and to on one rank: the blocks in the rank's view of the
// inference engine's pool, and the rank's stripe (its part of a slot) in the slots of the host pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layout/kv_view.h"
#include "transfer/host_pool.h"
#include "transfer/sub_batch.h"

namespace flexkv {

// The digest offset if a rank's slots have no run digests. The pages of such a rank are not verified.
inline constexpr int64_t kNoDigests = -1;

// An attached view does not change after construction. An op keeps a reference to its view, and so to the
// host pool's memory, for as long as it may read or write bytes.
class AttachedView {
 public:
  // `stripe_offset`: offset of the rank's stripe in a slot, a multiple of 4 KiB. `digest_offset`: offset of
  // the rank's run digests in a slot, a multiple of 8, or kNoDigests; each of view.runs() has a digest of 8
  // bytes. Throws GeometryError if an offset is invalid, if the stripe or the digests do not fit in a slot,
  // or if they overlap.
  AttachedView(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
               int64_t stripe_offset, int64_t digest_offset);

  int32_t group() const { return group_; }
  const KvView& view() const { return *view_; }
  const HostPool& pool() const { return *pool_; }
  // Unit: bytes. The size of layers [lo, hi) in the rank's stripe of one page.
  int64_t layer_bytes(int32_t lo, int32_t hi) const;
  // A page is moved in ranges of layers. Returns the first layer of each range, in ascending order; the first
  // entry is 0. A range has at most kSubBatchBytes bytes of a page, unless it is a single layer that is
  // larger.
  const std::vector<int32_t>& ranges() const { return ranges_; }

  std::byte* stripe(int32_t slot) const { return pool_->slot_address(slot) + stripe_offset_; }
  bool has_digests() const { return digest_offset_ != kNoDigests; }
  // The array of run digests in a slot: entry i is for run i of view().runs(). Precondition: has_digests().
  uint64_t* digests(int32_t slot) const {
    return reinterpret_cast<uint64_t*>(pool_->slot_address(slot) + digest_offset_);
  }
  // The indices in view().runs() of one layer's runs.
  const std::vector<size_t>& runs_of(int32_t layer) const { return layer_runs_[static_cast<size_t>(layer)]; }
  // The segments that a copy of layers [lo, hi) loops over. Adjacent segments are merged if [lo, hi) is all
  // layers, one of ranges() or a single layer; otherwise they are merged only within each layer.
  std::span<const Segment> segments(int32_t lo, int32_t hi) const;

 private:
  int32_t group_;
  std::shared_ptr<const KvView> view_;
  std::shared_ptr<HostPool> pool_;
  int64_t stripe_offset_;
  int64_t digest_offset_;
  std::vector<Segment> by_layer_;  // segments of layer 0, then of layer 1, and so on
  // Per layer: index of its first segment in by_layer_; the last entry is by_layer_'s size.
  std::vector<size_t> layer_begin_;
  std::vector<int64_t> layer_bytes_;
  std::vector<int32_t> ranges_;
  std::vector<std::vector<Segment>> by_range_;  // segments of each range; empty if there is only one range
  std::vector<std::vector<size_t>> layer_runs_;
};

}  // namespace flexkv
