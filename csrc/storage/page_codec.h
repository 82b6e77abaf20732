// The slot image of one KV group on disk: the positions of its runs, and the trailer that identifies the page
// and verifies the runs. docs/disk-format.md specifies the format.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/slot_image.h"
#include "storage/page_miss.h"
#include "storage/page_tag.h"

namespace flexkv {

inline constexpr uint64_t kPageMagic = 0x3145474150564B46;  // "FKVPAGE1"
inline constexpr uint32_t kPageVersion = 1;

// The fixed part of the trailer. In the image, the run digests follow it: one 64-bit digest per run,
// beginning with the runs of rank 0.
//
// If the fields change:
// - Raise kPageVersion; flexkv does not use folders of other versions. Raise VALUE_VERSION in
//   flexkv/remote/values.py, because values in a store have the same trailer. A test in
//   tests/unit/storage/test_pages.py contains both versions.
// - Change HEAD and DIGEST_AT in flexkv/cli/remote/stored_value.py, which also parses the trailer, and the
//   table in docs/disk-format.md.
// - If the size changes, change the number 96 in those two files, in docs/remote.md and in tests that damage
//   a trailer.
// - If a reader compares a field with an expected value, add the field to PageTag. The size of PageTag is
//   also in csrc/storage/page_tag.h, kTagBytes of csrc/transfer/op.h, TAG_BYTES of flexkv/transfer/graph.py,
//   TAG of flexkv/storage/tags.py and tests/unit/native_border/arguments.py.
// - If Python reads a field, add the field to trailer() of csrc/bindings/bind_storage.cpp and to
//   flexkv/c_ext.pyi.
//
// flexkv/storage/scan.py finds pages by `magic`.
struct PageTrailer {
  uint64_t magic = kPageMagic;
  uint32_t version = kPageVersion;
  uint32_t runs = 0;
  uint64_t slab_id = 0;
  uint64_t slot = 0;  // number of the slot in its slab
  PageTag tag = {};
  uint64_t written = 0;  // time of the write, in Unix seconds
  uint32_t group = 0;    // number of the KV group
  uint32_t reserved = 0;
  uint64_t digest = 0;  // digest of this struct (with this field set to 0) and of the run digests
};
inline constexpr int64_t kTrailerHeadBytes = 96;
static_assert(sizeof(PageTrailer) == kTrailerHeadBytes);

// A run: the bytes of one layer in one rank's stripe of a page, or a contiguous part of these bytes.
struct PageRun {
  int64_t offset = 0;  // from the start of the stripe; in PageCodec::runs(), from the start of the image
  int64_t bytes = 0;
  int32_t layer = 0;
};

// The slab and the slot in which a page is stored.
struct PagePlace {
  uint64_t slab_id = 0;
  uint64_t slot = 0;
};

// Writes and checks the trailers of one KV group's pages. A codec does not change after construction.
class PageCodec {
 public:
  // For each rank, `stripe_bytes` has the size of its stripe, and `runs` has its runs in ascending order of
  // their offsets. `host_digests`: whether device lanes write the run digests into the host slot. `group`:
  // the number of the KV group; it is recorded in the trailers. Throws GeometryError if the runs do not fill
  // the stripes or a layer has no run.
  PageCodec(std::vector<int64_t> stripe_bytes, const std::vector<std::vector<PageRun>>& runs,
            bool host_digests, uint32_t group = 0);

  const SlotImage& image() const { return image_; }
  int64_t image_bytes() const { return image_.total_bytes(); }
  int32_t layers() const { return layers_; }
  const std::vector<PageRun>& runs() const { return runs_; }
  bool host_digests() const { return host_digests_; }
  uint32_t group() const { return group_; }
  // The offset of a rank's first run digest in the image.
  int64_t digest_offset(int32_t rank) const;

  // The number of bytes from the start of the trailer to the end of the image: a multiple of 4 KiB. These
  // bytes contain only the trailer and padding.
  int64_t trailer_area_bytes() const { return image_.total_bytes() - image_.trailer_offset(); }
  size_t num_runs() const { return runs_.size(); }

  // Writes the trailer into `image`, which has image_bytes() bytes. Computes the run digests, unless
  // host_digests() is set: the run digests are then already in the image. `written`: Unix seconds.
  void seal(std::byte* image, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // Completes a trailer in a separate buffer that already contains the run digests.
  void seal_trailer(std::byte* trailer, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // Writes the trailer of the page in `image` to a separate buffer of image().trailer_bytes() bytes. Computes
  // the run digests from the stripes, unless host_digests() is set: it then copies them from the image.
  void seal_apart(const std::byte* image, std::byte* trailer, const PagePlace& place, const PageTag& tag,
                  uint64_t written) const;
  // Checks that the trailer in `image` is undamaged and not expired, and that it records `place`, this group
  // and the tag `wanted`. The expiry in `wanted` is not compared. If `wanted` is not set, any tag is
  // accepted. `now`: Unix seconds.
  PageCheck check_trailer(const std::byte* image, const PagePlace& place,
                          const std::optional<PageTag>& wanted, uint64_t now) const;
  // Does what check_trailer() does, for a trailer in a separate buffer.
  PageCheck check_trailer_alone(const std::byte* trailer, const PagePlace& place,
                                const std::optional<PageTag>& wanted, uint64_t now) const;
  // Checks that `bytes`, the content of run number `run`, match the run's digest in the trailer of `image`.
  PageCheck check_run(const std::byte* image, size_t run, const std::byte* bytes) const {
    return check_digest(image + image_.trailer_offset(), run, bytes);
  }
  // Checks all runs in `image`. Returns the failure of the first run that does not match its digest, or kNone
  // if all match.
  PageCheck check_runs(const std::byte* image) const;

  // Checks a trailer that seal_apart() wrote, and checks that the stripes in `image` match the trailer's run
  // digests. If the page passes and host_digests() is set, copies the run digests into the image.
  PageCheck check_apart(std::byte* image, const std::byte* trailer, const PagePlace& place,
                        const std::optional<PageTag>& wanted, uint64_t now) const;

  static PageTrailer trailer_of(const std::byte* trailer);

 private:
  uint64_t trailer_digest(const std::byte* trailer) const;
  int64_t digests_bytes() const { return static_cast<int64_t>(runs_.size() * sizeof(uint64_t)); }
  PageCheck check_digest(const std::byte* trailer, size_t run, const std::byte* bytes) const;

  SlotImage image_;
  std::vector<PageRun> runs_;
  std::vector<int64_t> first_run_;  // for each rank, the number of its first run
  int32_t layers_ = 0;
  bool host_digests_;
  uint32_t group_;
};

}  // namespace flexkv
