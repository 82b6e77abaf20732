// Describes where one block's bytes lie in the inference engine's pool, in a staging slot and in a file.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "layout/kv_view.h"
#include "layout/segment.h"

namespace flexkv {

// A range of bytes that is contiguous in the file and in the slot, so that one I/O call moves it.
// `file_offset` is relative to the block's place in the file, and the offset in the slot is relative to the
// slot's start.
struct FileExtent {
  int64_t file_offset = 0;
  int64_t slot_offset = 0;
  int64_t bytes = 0;
};

// A range of bytes that is contiguous in the file and in the pool, so that one I/O call moves it without
// staging. Its page_offset is relative to the block's place in the file.
using DirectPiece = Segment;

// The value of digest_offset() for pages without digests, such as those of raw files.
inline constexpr int64_t kNoDigestOffset = -1;

// Where one rank's stripe and digests lie in a slot image. All members are in bytes. No sector has bytes of
// both the trailer and a stripe.
struct StripePlace {
  int64_t stripe_offset = 0;
  int64_t trailer_offset = 0;
  int64_t digest_offset = 0;  // where this rank's run digests begin
  int64_t image_bytes = 0;
};

// The range of layers [lo, hi); by default, all layers.
struct LayerRange {
  int32_t lo = 0;
  int32_t hi = INT32_MAX;
  bool operator==(const LayerRange&) const = default;
};

class PageMap {
 public:
  // Maps runs of a pool to a file without headers. A run's page_offset is its offset in the file, relative to
  // the block's place. `runs` are sorted by page_offset and do not overlap in the file.
  static PageMap file(std::vector<Segment> runs);
  // Maps one rank's stripe of a slot image. In the staging slot, the image's trailer follows the stripe. The
  // trailer has the digests of the rank's runs. If `with_trailer` is set, I/O moves the stripe and the
  // trailer, otherwise only the stripe. Only the runs of `layers` are mapped; I/O moves the complete sectors
  // that contain them. Throws GeometryError if stripe and trailer overlap or do not lie on 4 KiB boundaries,
  // or if the layers' runs are not contiguous in the stripe.
  static PageMap stripe(const KvView& view, const StripePlace& place, bool with_trailer,
                        LayerRange layers = {});

  // The uncoalesced runs. Their page_offset is relative to the slot's start. Each run has a digest of its
  // own.
  const std::vector<Segment>& runs() const { return runs_; }
  // The index of the first of runs() among all runs of the stripe.
  size_t first_run() const { return first_run_; }
  // The coalesced runs. A copy between the pool and a slot loops over these segments.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<FileExtent>& extents() const { return extents_; }
  // The pieces that I/O moves directly between file and pool. Empty in a map that stripe() returns: its pages
  // pass through a slot, or are moved as beside_slots() describes.
  const std::vector<DirectPiece>& pieces() const { return pieces_; }
  // Returns a map of the same page in which the stripe does not pass through the slot: the pieces move
  // directly between file and pool, only the trailer passes through the slot, and the device computes the
  // digests from the bytes in the pool. Null for pages without digests.
  const PageMap* beside_slots() const { return beside_slots_.get(); }
  // Whether this is the map that beside_slots() of another map returned.
  bool in_place() const { return in_place_; }
  bool one_piece() const { return pieces_.size() == 1; }
  // The size of a staging slot, a multiple of 4 KiB.
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t digest_offset() const { return digest_offset_; }
  // The offset of the image's trailer in the slot; only meaningful for pages with digests.
  int64_t trailer_offset() const { return trailer_offset_; }
  bool has_digests() const { return digest_offset_ != kNoDigestOffset; }
  // How many bytes of the file are read or written for one page.
  int64_t page_bytes() const { return page_bytes_; }

 private:
  PageMap() = default;

  std::vector<Segment> runs_;
  size_t first_run_ = 0;
  std::vector<Segment> segments_;
  std::vector<FileExtent> extents_;
  std::vector<DirectPiece> pieces_;
  int64_t slot_bytes_ = 0;
  int64_t trailer_offset_ = 0;
  int64_t digest_offset_ = kNoDigestOffset;
  int64_t page_bytes_ = 0;
  bool in_place_ = false;
  std::shared_ptr<const PageMap> beside_slots_;
};

}  // namespace flexkv
