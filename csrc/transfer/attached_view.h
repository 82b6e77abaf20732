// What the transfer engine moves for one KV group: the rank's view of the engine's pool, and the rank's
// stripe in the host pool's slots.
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

// The digest offset for slots without room for this rank's run digests: its pages are then not verified.
inline constexpr int64_t kNoDigests = -1;

// Immutable. An op keeps a reference to it, and so to the host pool's memory, while the op may touch a byte.
class AttachedView {
 public:
  // `digest_offset`: where in a slot this rank's run digests lie, 8 bytes for each of view.runs(), or
  // kNoDigests. Throws GeometryError unless the stripe lies in a slot on a 4 KiB boundary, and the digests on
  // an 8-byte one outside of it.
  AttachedView(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
               int64_t stripe_offset, int64_t digest_offset);

  int32_t group() const { return group_; }
  const KvView& view() const { return *view_; }
  const HostPool& pool() const { return *pool_; }
  // Unit: bytes. The size of one page's layers [lo, hi).
  int64_t layer_bytes(int32_t lo, int32_t hi) const;
  // The first layer of each range of layers in which a page moves, from 0. A range has at most
  // kSubBatchBytes, or a single layer.
  const std::vector<int32_t>& ranges() const { return ranges_; }

  std::byte* stripe(int32_t slot) const { return pool_->slot_address(slot) + stripe_offset_; }
  bool has_digests() const { return digest_offset_ != kNoDigests; }
  // The array of run digests: entry i is for run i of view().runs(). Precondition: has_digests().
  uint64_t* digests(int32_t slot) const {
    return reinterpret_cast<uint64_t*>(pool_->slot_address(slot) + digest_offset_);
  }
  // The numbers of one layer's runs.
  const std::vector<size_t>& runs_of(int32_t layer) const { return layer_runs_[static_cast<size_t>(layer)]; }
  // The segments that a copy of layers [lo, hi) loops over. They are coalesced if [lo, hi) is all layers, one
  // of ranges() or a single layer; else they are each layer's own segments, one layer after another.
  std::span<const Segment> segments(int32_t lo, int32_t hi) const;

 private:
  int32_t group_;
  std::shared_ptr<const KvView> view_;
  std::shared_ptr<HostPool> pool_;
  int64_t stripe_offset_;
  int64_t digest_offset_;
  std::vector<Segment> by_layer_;    // segments of layer 0, then of layer 1, ...
  std::vector<size_t> layer_begin_;  // into by_layer_, num_layers + 1 entries
  std::vector<int64_t> layer_bytes_;
  std::vector<int32_t> ranges_;
  std::vector<std::vector<Segment>> by_range_;  // empty where there is one range
  std::vector<std::vector<size_t>> layer_runs_;
};

}  // namespace flexkv
