#include "gds/page_map.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {
namespace {

// Unit: bytes. Larger is a wrong number; products with layer counts stay far from overflow.
constexpr int64_t kMaxStrideBytes = int64_t{1} << 44;
constexpr int64_t kMaxLayers = 1 << 16;

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
  require_range(file.total_layers, 1, kMaxLayers, "total_layers");
  require_range(pool.num_layers, 1, kMaxLayers, "the pool's number of layers");
  require_range(pool.gpu_block_stride_in_bytes, file.chunk_bytes, kMaxStrideBytes,
                "the block stride of the pool");
  require_range(pool.gpu_kv_stride_in_bytes, 0, kMaxStrideBytes, "the kv stride of the pool");
  require_range(pool.gpu_layer_stride_in_bytes, 0, kMaxStrideBytes, "the layer stride of the pool");
  if (pool.gpu_tensor_ptrs == nullptr) throw GeometryError("the pool has no tensor addresses");
}

// Runs by their offset in the file, which stands in page_offset until slots are laid out.
std::vector<Segment> runs_in_file_order(const GTensorHandler& pool, const RawBlockLayout& file,
                                        std::span<const int32_t> layers) {
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
  check_sizes(pool, layout);
  if (layers.empty()) throw GeometryError("the list of layers is empty");
  PageMap map;
  map.runs_ = runs_in_file_order(pool, layout, layers);
  map.segments_ = coalesce(map.runs_);
  map.slot_bytes_ = round_up(layout.block_stride, kIoAlignBytes);
  for (const Segment& run : map.runs_) map.page_bytes_ += run.run_bytes;
  return map;
}

PageMap PageMap::raw(const GTensorHandler& pool, const RawBlockLayout& file,
                     std::span<const int32_t> layers) {
  check_sizes(pool, file);
  if (layers.empty()) throw GeometryError("the list of layers is empty");
  PageMap map;
  map.runs_ = runs_in_file_order(pool, file, layers);
  map.pieces_ = coalesce(map.runs_);
  for (Segment& run : map.runs_) {
    const int64_t in_file = run.page_offset;
    FileExtent* last = map.extents_.empty() ? nullptr : &map.extents_.back();
    if (last == nullptr || last->file_offset + last->bytes != in_file) {
      // Slots and files agree in alignment, so that an aligned file offset is an aligned address too.
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

PageMap PageMap::image(const KvView& view, int64_t stripe_offset, int64_t digest_offset,
                       int64_t image_bytes) {
  const int64_t digest_bytes = 8 * static_cast<int64_t>(view.runs().size());
  const int64_t stripe_end = stripe_offset + view.stripe_bytes();
  if (stripe_offset < 0 || stripe_offset % kIoAlignBytes != 0 || image_bytes % kIoAlignBytes != 0 ||
      stripe_end > image_bytes) {
    throw GeometryError("a stripe of " + std::to_string(view.stripe_bytes()) + " bytes at offset " +
                        std::to_string(stripe_offset) + " of an image of " + std::to_string(image_bytes) +
                        " bytes: it must lie inside, on a 4 KiB boundary, in whole 4 KiB");
  }
  if (digest_offset != kNoDigestOffset &&
      (digest_offset < 0 || digest_offset % 8 != 0 || digest_offset + digest_bytes > image_bytes ||
       (digest_offset < stripe_end && digest_offset + digest_bytes > stripe_offset))) {
    throw GeometryError(std::to_string(digest_bytes) + " bytes of digests at offset " +
                        std::to_string(digest_offset) +
                        ": allowed is an 8-byte boundary outside the stripe, within " +
                        std::to_string(image_bytes) + " bytes");
  }
  PageMap map;
  map.runs_ = view.runs();
  for (Segment& run : map.runs_) run.page_offset += stripe_offset;
  map.segments_ = coalesce(map.runs_);
  map.extents_ = {{0, 0, image_bytes}};
  if (digest_offset == kNoDigestOffset) map.pieces_ = map.segments_;
  if (digest_offset != kNoDigestOffset && map.segments_.size() == 1 && stripe_offset == 0 &&
      stripe_end % kIoAlignBytes == 0) {
    auto beside = std::shared_ptr<PageMap>(new PageMap());
    beside->runs_ = map.runs_;
    beside->segments_ = beside->pieces_ = map.segments_;
    beside->slot_bytes_ = image_bytes - stripe_end;
    beside->extents_ = {{stripe_end, 0, beside->slot_bytes_}};
    beside->digest_offset_ = digest_offset - stripe_end;
    beside->page_bytes_ = image_bytes;
    beside->in_place_ = true;
    map.beside_slots_ = std::move(beside);
  }
  map.slot_bytes_ = image_bytes;
  map.digest_offset_ = digest_offset;
  map.page_bytes_ = image_bytes;
  return map;
}

}  // namespace flexkv
