#include "transfer/attached_view.h"

#include <algorithm>
#include <numeric>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {

AttachedView::AttachedView(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
                           int64_t stripe_offset, int64_t digest_offset)
    : group_(group),
      view_(std::move(view)),
      pool_(std::move(pool)),
      stripe_offset_(stripe_offset),
      digest_offset_(digest_offset) {
  const int64_t slot_bytes = pool_->geometry().slot_bytes;
  const int64_t stripe_bytes = view_->stripe_bytes();
  const std::string name = "group " + std::to_string(group_);
  const std::string slots = "the pool's slots of " + std::to_string(slot_bytes) + " bytes";
  if (stripe_offset_ < 0 || stripe_offset_ % kIoAlignBytes != 0 ||
      stripe_bytes > slot_bytes - stripe_offset_) {
    throw GeometryError(name + ": a stripe of " + std::to_string(stripe_bytes) + " bytes at offset " +
                        std::to_string(stripe_offset_) + " must lie in " + slots + ", at a multiple of " +
                        std::to_string(kIoAlignBytes));
  }
  const auto digest_bytes = static_cast<int64_t>(view_->runs().size() * sizeof(uint64_t));
  const bool fits =
      digest_offset_ >= 0 && digest_offset_ % 8 == 0 && digest_bytes <= slot_bytes - digest_offset_;
  const bool good = fits && (digest_offset_ + digest_bytes <= stripe_offset_ ||
                             digest_offset_ >= stripe_offset_ + stripe_bytes);
  if (has_digests() && !good) {
    throw GeometryError(name + ": " + std::to_string(digest_bytes) + " bytes of digests at offset " +
                        std::to_string(digest_offset_) + " must lie in " + slots +
                        ", at a multiple of 8, outside the stripe at " + std::to_string(stripe_offset_));
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
  ranges_ = {0};
  int64_t range_bytes = 0;
  for (int32_t layer = 0; layer < view_->num_layers(); ++layer) {
    const int64_t bytes = layer_bytes(layer, layer + 1);
    if (range_bytes > 0 && range_bytes + bytes > kSubBatchBytes) {
      ranges_.push_back(layer);
      range_bytes = 0;
    }
    range_bytes += bytes;
  }
  for (size_t i = 0; ranges_.size() > 1 && i < ranges_.size(); ++i) {
    by_range_.push_back(
        view_->segments_of_layers(ranges_[i], i + 1 < ranges_.size() ? ranges_[i + 1] : view_->num_layers()));
  }
  layer_runs_.resize(static_cast<size_t>(view_->num_layers()));
  for (size_t run = 0; run < view_->runs().size(); ++run) {
    layer_runs_[static_cast<size_t>(view_->runs()[run].layer)].push_back(run);
  }
}

int64_t AttachedView::layer_bytes(int32_t lo, int32_t hi) const {
  return std::accumulate(layer_bytes_.begin() + lo, layer_bytes_.begin() + hi, int64_t{0});
}

std::span<const Segment> AttachedView::segments(int32_t lo, int32_t hi) const {
  if (lo == 0 && hi == view_->num_layers()) return view_->segments();
  const auto range = std::lower_bound(ranges_.begin(), ranges_.end(), lo);
  if (range != ranges_.end() && *range == lo) {
    const int32_t end = range + 1 == ranges_.end() ? view_->num_layers() : *(range + 1);
    if (hi == end) return by_range_[static_cast<size_t>(range - ranges_.begin())];
  }
  const size_t begin = layer_begin_[static_cast<size_t>(lo)];
  return std::span(by_layer_).subspan(begin, layer_begin_[static_cast<size_t>(hi)] - begin);
}

}  // namespace flexkv
