#include "gds/page_map.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {
namespace {

// Unit: bytes. A larger number is a mistake; products with layer counts stay far from overflow.
constexpr int64_t kMaxStrideBytes = int64_t{1} << 44;

std::string at(int64_t layer, int64_t kv) {
  return (kv == 0 ? "K of layer " : "V of layer ") + std::to_string(layer);
}

void require_range(int64_t value, int64_t lo, int64_t hi, const char* name) {
  if (value >= lo && value <= hi) return;
  throw GeometryError(std::string(name) + " is " + std::to_string(value) + ": allowed is [" +
                      std::to_string(lo) + ", " + std::to_string(hi) + "]");
}

void check_sizes(const GTensorHandler& pool, const RawBlockLayout& file) {
  require_range(file.chunk_bytes, 1, kMaxStrideBytes, "the chunk size in bytes");
  require_range(file.block_stride, file.chunk_bytes, kMaxStrideBytes, "the block stride of the file");
  require_range(file.layer_stride, 0, kMaxStrideBytes, "the layer stride of the file");
  require_range(file.kv_stride, 0, kMaxStrideBytes, "the kv stride of the file");
  require_range(file.copy_offset, 0, kMaxStrideBytes, "the copy offset inside chunks");
  require_range(file.kv_dim, 1, 2, "kv_dim");
  require_range(file.total_layers, 1, kMostRawLayers, "total_layers");
  require_range(pool.num_layers, 1, kMostRawLayers, "the pool's number of layers");
  require_range(pool.gpu_block_stride_in_bytes, file.chunk_bytes, kMaxStrideBytes,
                "the block stride of the pool");
  require_range(pool.gpu_kv_stride_in_bytes, 0, kMaxStrideBytes, "the kv stride of the pool");
  require_range(pool.gpu_layer_stride_in_bytes, 0, kMaxStrideBytes, "the layer stride of the pool");
  if (pool.gpu_tensor_ptrs == nullptr) throw GeometryError("the pool has no tensor addresses");
}

// Returns the runs, sorted by their offset in the file. Their page_offset holds that file offset until slots
// are laid out.
std::vector<Segment> runs_in_file_order(const GTensorHandler& pool, const RawBlockLayout& file,
                                        std::span<const int32_t> layers) {
  check_sizes(pool, file);
  if (layers.empty()) throw GeometryError("the list of layers is empty");
  std::vector<Segment> runs;
  for (const int32_t layer : layers) {
    if (layer < 0 || layer >= pool.num_layers || layer >= file.total_layers) {
      throw BlockRangeError("layer " + std::to_string(layer) + ": the pool has " +
                            std::to_string(pool.num_layers) + " layers, the file " +
                            std::to_string(file.total_layers));
    }
    for (int32_t kv = 0; kv < file.kv_dim; ++kv) {
      const int64_t offset = layer * file.layer_stride + kv * file.kv_stride + file.copy_offset;
      if (offset + file.chunk_bytes > file.block_stride) {
        throw GeometryError(at(layer, kv) + " ends at byte " + std::to_string(offset + file.chunk_bytes) +
                            " of a block of " + std::to_string(file.block_stride) + " in the file");
      }
      const uintptr_t base = pool.first_run(layer, kv);
      if (base == 0) throw GeometryError(at(layer, kv) + " has the address 0 in the pool");
      runs.push_back({base, pool.gpu_block_stride_in_bytes, file.chunk_bytes, offset, layer});
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const Segment& a, const Segment& b) { return a.page_offset < b.page_offset; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].page_offset < runs[i - 1].page_offset + runs[i - 1].run_bytes) {
      throw GeometryError("layers " + std::to_string(runs[i - 1].layer) + " and " +
                          std::to_string(runs[i].layer) + " share bytes of the file at offset " +
                          std::to_string(runs[i].page_offset) + " of a block");
    }
  }
  return runs;
}

}  // namespace

PageMap PageMap::memory(const GTensorHandler& pool, const RawBlockLayout& layout,
                        std::span<const int32_t> layers) {
  PageMap map;
  map.runs_ = runs_in_file_order(pool, layout, layers);
  map.segments_ = coalesce(map.runs_);
  map.slot_bytes_ = round_up(layout.block_stride, kIoAlignBytes);
  for (const Segment& run : map.runs_) map.page_bytes_ += run.run_bytes;
  return map;
}

PageMap PageMap::raw(const GTensorHandler& pool, const RawBlockLayout& file,
                     std::span<const int32_t> layers) {
  PageMap map;
  map.runs_ = runs_in_file_order(pool, file, layers);
  map.pieces_ = coalesce(map.runs_);
  for (Segment& run : map.runs_) {
    const int64_t in_file = run.page_offset;
    FileExtent* last = map.extents_.empty() ? nullptr : &map.extents_.back();
    if (last == nullptr || last->file_offset + last->bytes != in_file) {
      // An offset in the slot and in the file have the same alignment, so that an aligned file offset comes
      // with an aligned address.
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

PageMap PageMap::stripe(const KvView& view, const StripePlace& place, bool with_trailer) {
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
  const FileExtent trailer{place.trailer_offset, stripe_bytes, trailer_bytes};
  PageMap map;
  map.runs_ = view.runs();
  map.segments_ = coalesce(map.runs_);
  map.slot_bytes_ = stripe_bytes + trailer_bytes;
  map.trailer_offset_ = stripe_bytes;
  map.digest_offset_ = stripe_bytes + place.digest_offset - place.trailer_offset;
  map.extents_ = {{place.stripe_offset, 0, stripe_bytes}};
  if (with_trailer && place.stripe_offset + stripe_bytes == place.trailer_offset) {
    map.extents_.back().bytes += trailer_bytes;
  } else if (with_trailer) {
    map.extents_.push_back(trailer);
  }
  map.page_bytes_ = stripe_bytes + (with_trailer ? trailer_bytes : 0);

  auto beside = std::shared_ptr<PageMap>(new PageMap());
  beside->runs_ = map.runs_;
  beside->segments_ = beside->pieces_ = map.segments_;
  for (DirectPiece& piece : beside->pieces_) piece.page_offset += place.stripe_offset;
  beside->slot_bytes_ = trailer_bytes;
  beside->digest_offset_ = place.digest_offset - place.trailer_offset;
  if (with_trailer) beside->extents_ = {{trailer.file_offset, 0, trailer_bytes}};
  beside->page_bytes_ = map.page_bytes_;
  beside->in_place_ = true;
  map.beside_slots_ = std::move(beside);
  return map;
}

}  // namespace flexkv
