#include "layout/slot_image.h"

#include <utility>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {
namespace {

// The limits of a slot image's sizes. Below these limits, sums of sizes cannot overflow. A larger value is a
// mistake by the caller.
constexpr int64_t kMaxPartBytes = int64_t{1} << 48;  // the maximum size of a stripe or of the trailer
constexpr size_t kMostRanks = 4096;

}  // namespace

SlotImage::SlotImage(std::vector<int64_t> stripe_bytes, int64_t trailer_bytes)
    : stripes_(std::move(stripe_bytes)), trailer_bytes_(trailer_bytes) {
  if (stripes_.empty()) throw GeometryError("a slot image needs at least one stripe");
  if (stripes_.size() > kMostRanks) {
    throw GeometryError("a slot image of " + std::to_string(stripes_.size()) +
                        " stripes: allowed are up to " + std::to_string(kMostRanks));
  }
  for (size_t rank = 0; rank < stripes_.size(); ++rank) {
    if (stripes_[rank] <= 0 || stripes_[rank] > kMaxPartBytes) {
      throw GeometryError("stripe of rank " + std::to_string(rank) + " has " +
                          std::to_string(stripes_[rank]) + " bytes: allowed is [1, " +
                          std::to_string(kMaxPartBytes) + "]");
    }
    offsets_.push_back(trailer_offset_);
    trailer_offset_ += round_up(stripes_[rank], kIoAlignBytes);
  }
  if (trailer_bytes_ < 0 || trailer_bytes_ > kMaxPartBytes) {
    throw GeometryError("trailer_bytes is " + std::to_string(trailer_bytes_) + ": allowed is [0, " +
                        std::to_string(kMaxPartBytes) + "]");
  }
  total_bytes_ = trailer_offset_ + round_up(trailer_bytes_, kIoAlignBytes);
}

size_t SlotImage::checked(int32_t rank) const {
  if (rank < 0 || rank >= ranks()) {
    throw BlockRangeError("rank " + std::to_string(rank) + ": the slot image has ranks [0, " +
                          std::to_string(ranks()) + ")");
  }
  return static_cast<size_t>(rank);
}

}  // namespace flexkv
