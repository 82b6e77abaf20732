#include "transfer/attached_view.h"

#include "base/align.h"
#include "base/error.h"

namespace flexkv {

AttachedView::AttachedView(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
                           int64_t stripe_offset)
    : group_(group), view_(std::move(view)), pool_(std::move(pool)), stripe_offset_(stripe_offset) {
  const int64_t slot_bytes = pool_->geometry().slot_bytes;
  if (stripe_offset_ < 0 || stripe_offset_ % kIoAlignBytes != 0 ||
      view_->stripe_bytes() > slot_bytes - stripe_offset_) {
    throw GeometryError(
        "group " + std::to_string(group_) + ": a stripe of " + std::to_string(view_->stripe_bytes()) +
        " bytes at offset " + std::to_string(stripe_offset_) + " must lie in the pool's slots of " +
        std::to_string(slot_bytes) + " bytes, at a multiple of " + std::to_string(kIoAlignBytes));
  }
  layer_begin_.push_back(0);
  for (int32_t layer = 0; layer < view_->num_layers(); ++layer) {
    int64_t bytes = 0;
    for (const Segment& segment : view_->segments_of_layers(layer, layer + 1)) {
      by_layer_.push_back(segment);
      bytes += segment.run_bytes;
    }
    layer_begin_.push_back(by_layer_.size());
    layer_bytes_.push_back(bytes);
  }
}

std::span<const Segment> AttachedView::segments(int32_t lo, int32_t hi) const {
  if (lo == 0 && hi == view_->num_layers()) return view_->segments();
  const size_t begin = layer_begin_[static_cast<size_t>(lo)];
  return std::span(by_layer_).subspan(begin, layer_begin_[static_cast<size_t>(hi)] - begin);
}

}  // namespace flexkv
