#include "storage/page_codec.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/digest.h"
#include "base/error.h"

namespace flexkv {
namespace {

// Unit: layers. A run with this or a higher layer number is refused as a mistake.
constexpr int32_t kMostLayers = 1 << 16;

int64_t trailer_bytes(const std::vector<std::vector<PageRun>>& runs) {
  int64_t digests = 0;
  for (const auto& of_rank : runs) digests += static_cast<int64_t>(of_rank.size());
  return kTrailerHeadBytes + digests * static_cast<int64_t>(sizeof(uint64_t));
}

void check_stripe(size_t rank, int64_t bytes, const std::vector<PageRun>& runs) {
  int64_t end = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const PageRun& run = runs[i];
    if (run.offset != end || run.bytes <= 0 || run.bytes > bytes - end || run.layer < 0 ||
        run.layer >= kMostLayers) {
      throw GeometryError("run " + std::to_string(i) + " of rank " + std::to_string(rank) + ": " +
                          std::to_string(run.bytes) + " bytes at " + std::to_string(run.offset) +
                          " of layer " + std::to_string(run.layer) + "; expected one at " +
                          std::to_string(end) + " of at most " + std::to_string(bytes - end) +
                          " bytes, of a layer below " + std::to_string(kMostLayers));
    }
    end += run.bytes;
  }
  if (end != bytes) {
    throw GeometryError("the runs of rank " + std::to_string(rank) + " end at " + std::to_string(end) +
                        ", its stripe at " + std::to_string(bytes));
  }
}

std::string hex(const std::array<uint8_t, 16>& key) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : key) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

PageCheck differs(PageMiss miss, const char* what, uint64_t found, uint64_t wanted) {
  return {miss, std::string(what) + " " + std::to_string(found) + ", wanted " + std::to_string(wanted)};
}

}  // namespace

PageCodec::PageCodec(std::vector<int64_t> stripe_bytes, const std::vector<std::vector<PageRun>>& runs,
                     bool host_digests, uint32_t group)
    : image_(std::move(stripe_bytes), trailer_bytes(runs)), host_digests_(host_digests), group_(group) {
  if (runs.size() != static_cast<size_t>(image_.ranks())) {
    throw GeometryError(std::to_string(image_.ranks()) + " stripes with the runs of " +
                        std::to_string(runs.size()) + " ranks");
  }
  for (size_t rank = 0; rank < runs.size(); ++rank) {
    const auto number = static_cast<int32_t>(rank);
    check_stripe(rank, image_.stripe_bytes(number), runs[rank]);
    first_run_.push_back(static_cast<int64_t>(runs_.size()));
    for (PageRun run : runs[rank]) {
      run.offset += image_.stripe_offset(number);
      layers_ = std::max(layers_, run.layer + 1);
      runs_.push_back(run);
    }
  }
  std::vector<bool> has_run(static_cast<size_t>(layers_));
  for (const PageRun& run : runs_) has_run[static_cast<size_t>(run.layer)] = true;
  const auto without = std::find(has_run.begin(), has_run.end(), false);
  if (without != has_run.end()) {
    throw GeometryError("layer " + std::to_string(without - has_run.begin()) + " of " +
                        std::to_string(layers_) + " has no run");
  }
}

int64_t PageCodec::digest_offset(int32_t rank) const {
  static_cast<void>(image_.stripe_offset(rank));  // throws if there is no such rank
  return image_.trailer_offset() + kTrailerHeadBytes +
         first_run_[static_cast<size_t>(rank)] * static_cast<int64_t>(sizeof(uint64_t));
}

PageTrailer PageCodec::trailer_of(const std::byte* trailer) {
  PageTrailer head;
  std::memcpy(&head, trailer, sizeof(head));
  return head;
}

uint64_t PageCodec::trailer_digest(const std::byte* trailer) const {
  PageTrailer head = trailer_of(trailer);
  head.digest = 0;
  const uint64_t parts[2] = {run_digest(&head, sizeof(head)),
                             run_digest(trailer + kTrailerHeadBytes, runs_.size() * sizeof(uint64_t))};
  return run_digest(parts, sizeof(parts));
}

void PageCodec::seal(std::byte* image, const PagePlace& place, const PageTag& tag, uint64_t written) const {
  seal_apart(image, image + image_.trailer_offset(), place, tag, written);
}

void PageCodec::seal_apart(const std::byte* image, std::byte* trailer, const PagePlace& place,
                           const PageTag& tag, uint64_t written) const {
  if (host_digests_) {
    const std::byte* of_image = image + image_.trailer_offset();
    if (trailer != of_image) {
      std::memcpy(trailer + kTrailerHeadBytes, of_image + kTrailerHeadBytes,
                  static_cast<size_t>(digests_bytes()));
    }
  } else {
    for (size_t i = 0; i < runs_.size(); ++i) {
      const uint64_t digest = run_digest(image + runs_[i].offset, static_cast<size_t>(runs_[i].bytes));
      std::memcpy(trailer + kTrailerHeadBytes + i * sizeof(digest), &digest, sizeof(digest));
    }
  }
  seal_trailer(trailer, place, tag, written);
}

void PageCodec::seal_trailer(std::byte* trailer, const PagePlace& place, const PageTag& tag,
                             uint64_t written) const {
  PageTrailer head;
  head.runs = static_cast<uint32_t>(runs_.size());
  head.slab_id = place.slab_id;
  head.slot = place.slot;
  head.tag = tag;
  head.written = written;
  head.group = group_;
  std::memcpy(trailer, &head, sizeof(head));
  head.digest = trailer_digest(trailer);
  std::memcpy(trailer, &head, sizeof(head));
}

PageCheck PageCodec::check_trailer(const std::byte* image, const PagePlace& place,
                                   const std::optional<PageTag>& wanted, uint64_t now) const {
  return check_trailer_alone(image + image_.trailer_offset(), place, wanted, now);
}

PageCheck PageCodec::check_trailer_alone(const std::byte* trailer, const PagePlace& place,
                                         const std::optional<PageTag>& wanted, uint64_t now) const {
  const PageTrailer head = trailer_of(trailer);
  if (head.magic != kPageMagic) return {PageMiss::kTrailer, "no page here"};
  if (head.version != kPageVersion) {
    return differs(PageMiss::kVersion, "page format", head.version, kPageVersion);
  }
  if (head.runs != runs_.size() || head.digest != trailer_digest(trailer)) {
    return {PageMiss::kTrailer, "damaged trailer"};
  }
  if (head.slab_id != place.slab_id || head.slot != place.slot) {
    return differs(PageMiss::kElsewhere, "page of slot", head.slot, place.slot);
  }
  if (head.group != group_) return differs(PageMiss::kGroup, "page of KV group", head.group, group_);
  if (wanted) {
    if (head.tag.key != wanted->key) {
      return {PageMiss::kKey, "key " + hex(head.tag.key) + ", wanted " + hex(wanted->key)};
    }
    if (head.tag.epoch != wanted->epoch) {
      return differs(PageMiss::kEpoch, "epoch", head.tag.epoch, wanted->epoch);
    }
    if (head.tag.generation != wanted->generation) {
      return differs(PageMiss::kGeneration, "generation", head.tag.generation, wanted->generation);
    }
    if (head.tag.tokens != wanted->tokens) {
      return differs(PageMiss::kTokens, "valid tokens", head.tag.tokens, wanted->tokens);
    }
  }
  if (head.tag.expiry != 0 && head.tag.expiry <= now) {
    return {PageMiss::kExpired, "expired at " + std::to_string(head.tag.expiry)};
  }
  return {};
}

PageCheck PageCodec::check_apart(std::byte* image, const std::byte* trailer, const PagePlace& place,
                                 const std::optional<PageTag>& wanted, uint64_t now) const {
  PageCheck check = check_trailer_alone(trailer, place, wanted, now);
  for (size_t i = 0; i < runs_.size() && check.miss == PageMiss::kNone; ++i) {
    check = check_digest(trailer, i, image + runs_[i].offset);
  }
  if (check.miss == PageMiss::kNone && host_digests_) {
    std::memcpy(image + image_.trailer_offset() + kTrailerHeadBytes, trailer + kTrailerHeadBytes,
                static_cast<size_t>(digests_bytes()));
  }
  return check;
}

PageCheck PageCodec::check_digest(const std::byte* trailer, size_t run, const std::byte* bytes) const {
  uint64_t wanted = 0;
  std::memcpy(&wanted, trailer + kTrailerHeadBytes + run * sizeof(wanted), sizeof(wanted));
  if (run_digest(bytes, static_cast<size_t>(runs_[run].bytes)) == wanted) return {};
  return {PageMiss::kData,
          "damaged run " + std::to_string(run) + " (layer " + std::to_string(runs_[run].layer) + ")"};
}

PageCheck PageCodec::check_runs(const std::byte* image) const {
  for (size_t i = 0; i < runs_.size(); ++i) {
    PageCheck check = check_run(image, i, image + runs_[i].offset);
    if (check.miss != PageMiss::kNone) return check;
  }
  return {};
}

}  // namespace flexkv
