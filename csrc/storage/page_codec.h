// The slot image of one KV group on disk: where its runs lie, and the trailer that says whose they are and
// proves them. Specified in docs/disk-format.md.
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

// Followed by one 64-bit digest for each run, of rank 0 first.
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
  int64_t offset = 0;  // in the stripe; in PageCodec::runs() in the image
  int64_t bytes = 0;
  int32_t layer = 0;
};

// Which slot of which slab.
struct PagePlace {
  uint64_t slab_id = 0;
  uint64_t slot = 0;
};

// Immutable.
class PageCodec {
 public:
  // Of each rank the stripe's size and its runs, ascending by offset. `host_digests`: device lanes write the
  // run digests into the slot. `group`: the number of the KV group, which its pages name. Throws
  // GeometryError unless the runs fill the stripes and every layer has one.
  PageCodec(std::vector<int64_t> stripe_bytes, const std::vector<std::vector<PageRun>>& runs,
            bool host_digests, uint32_t group = 0);

  const SlotImage& image() const { return image_; }
  int64_t image_bytes() const { return image_.total_bytes(); }
  int32_t layers() const { return layers_; }
  const std::vector<PageRun>& runs() const { return runs_; }
  bool host_digests() const { return host_digests_; }
  uint32_t group() const { return group_; }
  // Of a rank's first run digest, in the image.
  int64_t digest_offset(int32_t rank) const;

  // Bytes from the trailer on: whole sectors, which hold nothing else.
  int64_t trailer_area_bytes() const { return image_.total_bytes() - image_.trailer_offset(); }
  size_t num_runs() const { return runs_.size(); }

  // Writes the trailer into `image` (image_bytes() of them): all of it, or with host_digests() all but the
  // run digests.
  void seal(std::byte* image, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // The same for a trailer that lies alone, after its run digests.
  void seal_trailer(std::byte* trailer, const PagePlace& place, const PageTag& tag, uint64_t written) const;
  // The same for a trailer of trailer_bytes() that lies apart from the stripes, which `image` has: its run
  // digests are made from them or, with host_digests(), taken from the image.
  void seal_apart(const std::byte* image, std::byte* trailer, const PagePlace& place, const PageTag& tag,
                  uint64_t written) const;
  // Whether the trailer is whole, from this place, of this group, and of what `wanted` names, its expiry
  // aside. Without `wanted` any tag will do. `now`: unix seconds.
  PageCheck check_trailer(const std::byte* image, const PagePlace& place,
                          const std::optional<PageTag>& wanted, uint64_t now) const;
  PageCheck check_trailer_alone(const std::byte* trailer, const PagePlace& place,
                                const std::optional<PageTag>& wanted, uint64_t now) const;
  // Whether run i has the digest that the trailer names.
  PageCheck check_run(const std::byte* image, size_t run, const std::byte* bytes) const {
    return check_digest(image + image_.trailer_offset(), run, bytes);
  }
  PageCheck check_runs(const std::byte* image) const;

  // Whether such a trailer is what check_trailer_alone() asks for, and the stripes in `image` match its run
  // digests; with host_digests() the image has them then.
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
