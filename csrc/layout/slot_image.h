// The geometry of a slot image: [stripe of rank 0]...[stripe of rank n-1][trailer]. Each stripe and the
// trailer begin on a 4 KiB boundary.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace flexkv {

class SlotImage {
 public:
  // `stripe_bytes` has the size of each rank's stripe. If `trailer_bytes` is 0, there is no trailer. The
  // trailer does not share a disk sector with a stripe, so that the write of the trailer, which commits the
  // page, does not rewrite any byte of the stripes. Throws GeometryError if there is no stripe, if a stripe's
  // size is not positive, if the trailer's size is negative, or if a size or the number of ranks exceeds its
  // limit.
  explicit SlotImage(std::vector<int64_t> stripe_bytes, int64_t trailer_bytes = 0);

  int32_t ranks() const { return static_cast<int32_t>(stripes_.size()); }
  // stripe_offset() and stripe_bytes() throw BlockRangeError if `rank` is not in [0, ranks()).
  int64_t stripe_offset(int32_t rank) const { return offsets_[checked(rank)]; }
  int64_t stripe_bytes(int32_t rank) const { return stripes_[checked(rank)]; }
  int64_t trailer_offset() const { return trailer_offset_; }
  int64_t trailer_bytes() const { return trailer_bytes_; }
  // The size of a slot image, a multiple of 4 KiB.
  int64_t total_bytes() const { return total_bytes_; }

  bool operator==(const SlotImage&) const = default;

 private:
  size_t checked(int32_t rank) const;

  std::vector<int64_t> stripes_;
  std::vector<int64_t> offsets_;
  int64_t trailer_bytes_;
  int64_t trailer_offset_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace flexkv
