// How one block moves: its runs in the engine's pool, its bytes in a staging slot, and its bytes in a file.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "layout/kv_view.h"
#include "layout/segment.h"

namespace flexkv {

// A range that is contiguous in the file and in the slot, so that one I/O call moves it. Offsets count from
// the block's place in the file and from the slot's start.
struct FileExtent {
  int64_t file_offset = 0;
  int64_t slot_offset = 0;
  int64_t bytes = 0;
};

// A range that is contiguous in the file and in the pool, so that one I/O call moves it without staging. Its
// page_offset counts from the block's place in the file.
using DirectPiece = Segment;

// The digest offset of pages without digests, such as those of raw files.
inline constexpr int64_t kNoDigestOffset = -1;

// Where one rank's stripe and digests lie in a slot image, in bytes. The trailer's sectors hold nothing else.
struct StripePlace {
  int64_t stripe_offset = 0;
  int64_t trailer_offset = 0;
  int64_t digest_offset = 0;  // of this rank's run digests
  int64_t image_bytes = 0;
};

// Layers [lo, hi).
struct LayerRange {
  int32_t lo = 0;
  int32_t hi = INT32_MAX;
  bool operator==(const LayerRange&) const = default;
};

class PageMap {
 public:
  // Maps runs of a pool to a file without headers. Their page_offset is where they lie in the file; they are
  // sorted by it and do not overlap there.
  static PageMap file(std::vector<Segment> runs);
  // Maps one rank's stripe of a slot image. In the slot, the image's trailer follows the stripe and holds the
  // digests of the rank's runs. `with_trailer`: I/O moves stripe and trailer, else only the stripe. `layers`:
  // maps the runs of these layers alone; I/O moves the whole sectors that hold them. Throws GeometryError
  // unless they fit on 4 KiB boundaries without overlap, or if the layers' runs do not follow each other.
  static PageMap stripe(const KvView& view, const StripePlace& place, bool with_trailer,
                        LayerRange layers = {});

  // Uncoalesced; page_offset counts from the slot's start. Each digest covers one run.
  const std::vector<Segment>& runs() const { return runs_; }
  // The number of the first of them among the stripe's.
  size_t first_run() const { return first_run_; }
  // Coalesced. A copy between pool and slot loops over these.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<FileExtent>& extents() const { return extents_; }
  // Empty in the maps of stripe(): their pages pass through a slot, or move as beside_slots() says.
  const std::vector<DirectPiece>& pieces() const { return pieces_; }
  // Maps the same page without its stripe in the slot: the pieces move directly between file and pool, only
  // the trailer passes through the slot, and the transform computes digests of the bytes in the pool. Null
  // for pages without digests.
  const PageMap* beside_slots() const { return beside_slots_.get(); }
  bool in_place() const { return in_place_; }
  bool one_piece() const { return pieces_.size() == 1; }
  // A multiple of 4 KiB.
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t digest_offset() const { return digest_offset_; }
  // For pages with digests: where the image's trailer lies in the slot.
  int64_t trailer_offset() const { return trailer_offset_; }
  bool has_digests() const { return digest_offset_ != kNoDigestOffset; }
  // How many bytes of the file one page moves.
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
