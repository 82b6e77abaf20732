// The slot image of one KV group on disk: where its runs lie, and the trailer that identifies and verifies
// them. docs/disk-format.md specifies it.
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

// In the image, one 64-bit digest per run follows it, those of rank 0 first. If its fields change, raise
// kPageVersion (folders of other versions are left alone) and VALUE_VERSION in flexkv/remote/values.py
// (values in a store have this trailer too); a test in tests/unit/storage/test_pages.py holds both versions.
// Change HEAD in flexkv/cli/remote/stored_value.py, which also parses it, the table in docs/disk-format.md,
// and, if the size changes, the 96 bytes there, in docs/remote.md and in tests that damage a trailer. A field
// that a reader compares with what it wants belongs in PageTag; one that Python reads, also in trailer() of
// csrc/bindings/bind_storage.cpp. flexkv/storage/scan.py finds pages by the magic.
struct PageTrailer {
  uint64_t magic = kPageMagic;
  uint32_t version = kPageVersion;
  uint32_t runs = 0;
  uint64_t slab_id = 0;
  uint64_t slot = 0;  // of its slab
  PageTag tag = {};
  uint64_t written = 0;  // unix seconds
  uint32_t group = 0;    // number of the KV group
  uint32_t reserved = 0;
  uint64_t digest = 0;  // of the trailer and the run digests, with this field 0
};
inline constexpr int64_t kTrailerHeadBytes = 96;
static_assert(sizeof(PageTrailer) == kTrailerHeadBytes);

struct PageRun {
  int64_t offset = 0;  // counted in the stripe, but in PageCodec::runs() in the image
  int64_t bytes = 0;
  int32_t layer = 0;
};

// A slot and its slab.
struct PagePlace {
  uint64_t slab_id = 0;
  uint64_t slot = 0;
};

// Immutable.
class PageCodec {
 public:
  // `stripe_bytes`, `runs`: each rank's stripe size and its runs, ascending by offset. `host_digests`:
  // whether device lanes write the run digests into the slot. `group`: the KV group's number, which its
  // trailers record. Throws GeometryError unless the runs fill the stripes and every layer has a run.
  PageCodec(std::vector<int64_t> stripe_bytes, const std::vector<std::vector<PageRun>>& runs,
            bool host_digests, uint32_t group = 0);

  const SlotImage& image() const { return image_; }
  int64_t image_bytes() const { return image_.total_bytes(); }
  int32_t layers() const { return layers_; }
  const std::vector<PageRun>& runs() const { return runs_; }
  bool host_digests() const { return host_digests_; }
  uint32_t group() const { return group_; }
  // The offset in the image of a rank's first run digest.
  int64_t digest_offset(int32_t rank) const;

  // The bytes from the trailer to the image's end: whole sectors, which hold nothing else.
  int64_t trailer_area_bytes() const { return image_.total_bytes() - image_.trailer_offset(); }
  size_t num_runs() const { return runs_.size(); }

  // Writes the trailer into `image`, which has image_bytes() bytes. With host_digests() it leaves the run
  // digests as they are.
  void seal(std::byte* image, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // Seals a trailer in a separate buffer that already has its run digests.
  void seal_trailer(std::byte* trailer, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // Seals a trailer of image().trailer_bytes() in a buffer apart from the stripes in `image`: computes the
  // run digests from the stripes or, with host_digests(), copies those in the image.
  void seal_apart(const std::byte* image, std::byte* trailer, const PagePlace& place, const PageTag& tag,
                  uint64_t written) const;
  // Whether the trailer is undamaged, not expired, and names this place, this group and the tag `wanted`
  // (whose expiry is not compared). Without `wanted` any tag will do. `now`: Unix seconds.
  PageCheck check_trailer(const std::byte* image, const PagePlace& place,
                          const std::optional<PageTag>& wanted, uint64_t now) const;
  PageCheck check_trailer_alone(const std::byte* trailer, const PagePlace& place,
                                const std::optional<PageTag>& wanted, uint64_t now) const;
  // Whether `bytes`, the content of run `run`, match the digest in the trailer in `image`.
  PageCheck check_run(const std::byte* image, size_t run, const std::byte* bytes) const {
    return check_digest(image + image_.trailer_offset(), run, bytes);
  }
  PageCheck check_runs(const std::byte* image) const;

  // Whether check_trailer_alone() accepts a trailer that seal_apart() wrote, and the stripes in `image` match
  // its run digests. With host_digests() it then copies these digests into the image.
  PageCheck check_apart(std::byte* image, const std::byte* trailer, const PagePlace& place,
                        const std::optional<PageTag>& wanted, uint64_t now) const;

  static PageTrailer trailer_of(const std::byte* trailer);

 private:
  uint64_t trailer_digest(const std::byte* trailer) const;
  int64_t digests_bytes() const { return static_cast<int64_t>(runs_.size() * sizeof(uint64_t)); }
  PageCheck check_digest(const std::byte* trailer, size_t run, const std::byte* bytes) const;

  SlotImage image_;
  std::vector<PageRun> runs_;
  std::vector<int64_t> first_run_;  // of each rank
  int32_t layers_ = 0;
  bool host_digests_;
  uint32_t group_;
};

}  // namespace flexkv
