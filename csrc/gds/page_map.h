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

// Contiguous in the file and in the slot: one I/O call. Offsets are from the block's place in the file and
// from the slot's start.
struct FileExtent {
  int64_t file_offset = 0;
  int64_t slot_offset = 0;
  int64_t bytes = 0;
};

// Contiguous in the file and in the pool: one I/O call without staging. `run.page_offset` is the offset from
// the block's place in the file.
using DirectPiece = Segment;

// Unit: layers. A pool or a file with more is a wrong number.
inline constexpr int64_t kMostRawLayers = 1 << 16;

// Where the digests of a page's runs lie in its slot; there are none in raw files.
inline constexpr int64_t kNoDigestOffset = -1;

// Bytes of a block in a raw file, all from the block's place: layer l's K (kv 0) or V (kv 1) starts at
// l * layer_stride + kv * kv_stride + copy_offset.
struct RawBlockLayout {
  int64_t layer_stride = 0;
  int64_t kv_stride = 0;
  int64_t block_stride = 0;
  int64_t copy_offset = 0;  // this rank's part of a chunk that several ranks share
  int64_t chunk_bytes = 0;  // what moves of one layer's K or V
  int32_t kv_dim = 2;
  int64_t total_layers = 0;
};

// Where one rank's part of a slot image lies in it, in bytes. The trailer's sectors hold nothing else.
struct StripePlace {
  int64_t stripe_offset = 0;
  int64_t trailer_offset = 0;
  int64_t digest_offset = 0;  // of this rank's run digests
  int64_t image_bytes = 0;
};

class PageMap {
 public:
  // Of `layers` (any order, each once) of a pool and a raw file. Throws GeometryError for sizes that are not
  // positive, chunks that overlap each other or leave their block, or pool strides shorter than a chunk;
  // BlockRangeError for layers outside the pool or the file.
  static PageMap raw(const GTensorHandler& pool, const RawBlockLayout& file, std::span<const int32_t> layers);
  // The same between a pool and memory that has the file's layout: the runs lie in the "slot", a block in
  // that memory, where the layout says. There are no extents and no pieces.
  static PageMap memory(const GTensorHandler& pool, const RawBlockLayout& layout,
                        std::span<const int32_t> layers);
  // Of one rank's stripe of a slot image. In the slot it is followed by the image's trailer, where the
  // digests of the rank's runs lie; `with_trailer`: this is in the file too, else only the stripe is. Throws
  // GeometryError unless they fit, apart from each other, on 4 KiB boundaries.
  static PageMap stripe(const KvView& view, const StripePlace& place, bool with_trailer);

  // Uncoalesced; page_offset is in the slot. A digest covers one of these.
  const std::vector<Segment>& runs() const { return runs_; }
  // Coalesced: what a copy between pool and slot loops over.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<FileExtent>& extents() const { return extents_; }
  // Empty for pages with digests: these pass through a slot, but for what beside_slots() says.
  const std::vector<DirectPiece>& pieces() const { return pieces_; }
  // The same page without its stripe in the slot: its pieces go straight between file and pool, only the
  // trailer passes through the slot, and the transform digests in the pool. Null for pages without digests.
  const PageMap* beside_slots() const { return beside_slots_.get(); }
  bool in_place() const { return in_place_; }
  bool one_piece() const { return pieces_.size() == 1; }
  // A multiple of 4 KiB.
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t digest_offset() const { return digest_offset_; }
  // Of a page with digests: where the image's trailer lies in the slot.
  int64_t trailer_offset() const { return trailer_offset_; }
  bool has_digests() const { return digest_offset_ != kNoDigestOffset; }
  // Of one page in the file, by all extents.
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
