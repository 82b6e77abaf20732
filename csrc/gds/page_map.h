// How one block moves: its runs in the engine's pool, its bytes in a staging slot, and its bytes in a file.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gds/gtensor_handler.h"
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

// Unit: layers. A pool or file that claims more layers is described wrongly.
inline constexpr int64_t kMostRawLayers = 1 << 16;

// The digest offset of pages without digests, such as those of raw files.
inline constexpr int64_t kNoDigestOffset = -1;

// The layout of a block in a raw file, in bytes from the block's place: layer l's K (kv 0) or V (kv 1) starts
// at l * layer_stride + kv * kv_stride + copy_offset.
struct RawBlockLayout {
  int64_t layer_stride = 0;
  int64_t kv_stride = 0;
  int64_t block_stride = 0;
  int64_t copy_offset = 0;  // start of this rank's part in a chunk that several ranks share
  int64_t chunk_bytes = 0;  // how much of one layer's K or V moves
  int32_t kv_dim = 2;
  int64_t total_layers = 0;
};

// Where one rank's stripe and digests lie in a slot image, in bytes. The trailer's sectors hold nothing else.
struct StripePlace {
  int64_t stripe_offset = 0;
  int64_t trailer_offset = 0;
  int64_t digest_offset = 0;  // of this rank's run digests
  int64_t image_bytes = 0;
};

class PageMap {
 public:
  // Maps `layers` (any order, each once) of a pool to a raw file. Throws GeometryError for sizes that are not
  // positive, chunks that overlap each other or leave their block, or pool strides shorter than a chunk;
  // BlockRangeError for layers outside the pool or the file.
  static PageMap raw(const GTensorHandler& pool, const RawBlockLayout& file, std::span<const int32_t> layers);
  // The same between a pool and memory that has the file's layout: the "slot" is a block of that memory, and
  // the layout says where the runs lie in it. There are no extents and no pieces.
  static PageMap memory(const GTensorHandler& pool, const RawBlockLayout& layout,
                        std::span<const int32_t> layers);
  // Maps one rank's stripe of a slot image. In the slot, the image's trailer follows the stripe and holds the
  // digests of the rank's runs. `with_trailer`: I/O moves stripe and trailer, else only the stripe. Throws
  // GeometryError unless they fit on 4 KiB boundaries without overlap.
  static PageMap stripe(const KvView& view, const StripePlace& place, bool with_trailer);

  // Uncoalesced; page_offset counts from the slot's start. Each digest covers one run.
  const std::vector<Segment>& runs() const { return runs_; }
  // Coalesced. A copy between pool and slot loops over these.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<FileExtent>& extents() const { return extents_; }
  // Empty in the maps of memory() and stripe(): their pages pass through a slot, or move as beside_slots()
  // says.
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
