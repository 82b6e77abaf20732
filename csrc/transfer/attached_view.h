// A KV group as the engine moves it: the rank's view of the engine's pool, and its stripe in the host pool's
// slots.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layout/kv_view.h"
#include "transfer/host_pool.h"

namespace flexkv {

// Immutable. Ops hold it while they may touch a byte, and with it the host pool's memory.
class AttachedView {
 public:
  // Throws GeometryError unless [stripe_offset, + view's stripe) lies in a slot, on a 4 KiB boundary.
  AttachedView(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
               int64_t stripe_offset);

  int32_t group() const { return group_; }
  const KvView& view() const { return *view_; }
  const HostPool& pool() const { return *pool_; }
  int64_t stripe_offset() const { return stripe_offset_; }
  int64_t layer_bytes(int32_t layer) const { return layer_bytes_[static_cast<size_t>(layer)]; }

  std::byte* stripe(int32_t slot) const { return pool_->slot_address(slot) + stripe_offset_; }
  // What a copy of layers [lo, hi) loops over: prepared for all layers and for each single one, else the
  // layers' own segments one after the other.
  std::span<const Segment> segments(int32_t lo, int32_t hi) const;

 private:
  int32_t group_;
  std::shared_ptr<const KvView> view_;
  std::shared_ptr<HostPool> pool_;
  int64_t stripe_offset_;
  std::vector<Segment> by_layer_;    // segments of layer 0, then of layer 1, ...
  std::vector<size_t> layer_begin_;  // into by_layer_, num_layers + 1 entries
  std::vector<int64_t> layer_bytes_;
};

}  // namespace flexkv
