#include "gds/page_map.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {

PageMap PageMap::file(std::vector<Segment> runs) {
  PageMap map;
  map.runs_ = std::move(runs);
  map.pieces_ = coalesce(map.runs_);
  for (Segment& run : map.runs_) {
    const int64_t in_file = run.page_offset;
    FileExtent* last = map.extents_.empty() ? nullptr : &map.extents_.back();
    if (last == nullptr || last->file_offset + last->bytes != in_file) {
      // The extent begins on a 4 KiB boundary of the slot. So the memory address is aligned whenever the file
      // offset is aligned.
      map.extents_.push_back({in_file, round_up(map.slot_bytes_, kIoAlignBytes), 0});
      last = &map.extents_.back();
    }
    run.page_offset = last->slot_offset + last->bytes;
    last->bytes += run.run_bytes;
    map.slot_bytes_ = last->slot_offset + last->bytes;
    map.page_bytes_ += run.run_bytes;
  }
  map.slot_bytes_ = round_up(map.slot_bytes_, kIoAlignBytes);
  map.segments_ = coalesce(map.runs_);
  return map;
}

namespace {

// Returns the runs of `layers`, and the index in view.runs() of the first of these runs. Throws GeometryError
// if there are none, or if runs of other layers lie between these runs.
std::pair<std::vector<Segment>, size_t> runs_of_layers(const KvView& view, LayerRange layers) {
  const std::vector<Segment>& all = view.runs();
  const auto chosen = [&](const Segment& run) { return run.layer >= layers.lo && run.layer < layers.hi; };
  const auto first = std::find_if(all.begin(), all.end(), chosen);
  const auto end = std::find_if_not(first, all.end(), chosen);
  if (first == end || std::any_of(end, all.end(), chosen)) {
    throw GeometryError("layers " + std::to_string(layers.lo) + " to " + std::to_string(layers.hi) +
                        " of a page: their runs must be one sequence of the stripe's");
  }
  return {{first, end}, static_cast<size_t>(first - all.begin())};
}

}  // namespace

PageMap PageMap::stripe(const KvView& view, const StripePlace& place, bool with_trailer, LayerRange layers) {
  const int64_t stripe_bytes = round_up(view.stripe_bytes(), kIoAlignBytes);
  const int64_t trailer_bytes = place.image_bytes - place.trailer_offset;
  const int64_t digest_bytes = 8 * static_cast<int64_t>(view.runs().size());
  const auto aligned = [](int64_t offset) { return offset >= 0 && offset % kIoAlignBytes == 0; };
  if (!aligned(place.stripe_offset) || !aligned(place.trailer_offset) || !aligned(place.image_bytes) ||
      place.stripe_offset + stripe_bytes > place.trailer_offset || trailer_bytes <= 0) {
    throw GeometryError("a stripe of " + std::to_string(view.stripe_bytes()) + " bytes at offset " +
                        std::to_string(place.stripe_offset) + " of an image of " +
                        std::to_string(place.image_bytes) + " bytes with a trailer at " +
                        std::to_string(place.trailer_offset) +
                        ": all must lie on 4 KiB boundaries, the stripe before the trailer");
  }
  if (place.digest_offset < place.trailer_offset || place.digest_offset % 8 != 0 ||
      place.digest_offset + digest_bytes > place.image_bytes) {
    throw GeometryError(std::to_string(digest_bytes) + " bytes of digests at offset " +
                        std::to_string(place.digest_offset) +
                        ": they must lie in the trailer, on an 8-byte boundary");
  }
  const auto [runs, first_run] = runs_of_layers(view, layers);
  const int64_t begin = runs.front().page_offset / kIoAlignBytes * kIoAlignBytes;
  const int64_t bytes = round_up(runs.back().page_offset + runs.back().run_bytes, kIoAlignBytes) - begin;
  const int64_t in_trailer =
      place.digest_offset - place.trailer_offset + static_cast<int64_t>(first_run * sizeof(uint64_t));
  const FileExtent trailer{place.trailer_offset, bytes, trailer_bytes};
  PageMap map;
  map.runs_ = runs;
  map.first_run_ = first_run;
  for (Segment& run : map.runs_) run.page_offset -= begin;
  map.segments_ = coalesce(map.runs_);
  map.slot_bytes_ = bytes + trailer_bytes;
  map.trailer_offset_ = bytes;
  map.digest_offset_ = bytes + in_trailer;
  map.extents_ = {{place.stripe_offset + begin, 0, bytes}};
  if (with_trailer && place.stripe_offset + begin + bytes == place.trailer_offset) {
    map.extents_.back().bytes += trailer_bytes;
  } else if (with_trailer) {
    map.extents_.push_back(trailer);
  }
  map.page_bytes_ = bytes + (with_trailer ? trailer_bytes : 0);

  auto beside = std::shared_ptr<PageMap>(new PageMap());
  beside->runs_ = map.runs_;
  beside->first_run_ = first_run;
  beside->segments_ = map.segments_;
  beside->pieces_ = coalesce(runs);
  for (DirectPiece& piece : beside->pieces_) piece.page_offset += place.stripe_offset;
  beside->slot_bytes_ = trailer_bytes;
  beside->digest_offset_ = in_trailer;
  if (with_trailer) beside->extents_ = {{trailer.file_offset, 0, trailer_bytes}};
  beside->page_bytes_ = map.page_bytes_;
  beside->in_place_ = true;
  map.beside_slots_ = std::move(beside);
  return map;
}

}  // namespace flexkv
