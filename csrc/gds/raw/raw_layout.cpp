#include "gds/raw/raw_layout.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace flexkv {
namespace {

// Unit: layers. The maximum number of layers of a pool or a file. A description with more layers is a mistake
// by the caller.
constexpr int64_t kMostLayers = 1 << 16;
// Unit: bytes. The maximum stride. A larger value is a mistake by the caller. Up to this limit, products of
// strides and numbers of layers are far from overflow.
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
  require_range(file.total_layers, 1, kMostLayers, "total_layers");
  require_range(pool.num_layers, 1, kMostLayers, "the pool's number of layers");
  require_range(pool.gpu_block_stride_in_bytes, file.chunk_bytes, kMaxStrideBytes,
                "the block stride of the pool");
  require_range(pool.gpu_kv_stride_in_bytes, 0, kMaxStrideBytes, "the kv stride of the pool");
  require_range(pool.gpu_layer_stride_in_bytes, 0, kMaxStrideBytes, "the layer stride of the pool");
  if (pool.gpu_tensor_ptrs == nullptr) throw GeometryError("the pool has no tensor addresses");
}

// Returns the runs of `layers`, sorted by their offset in the file. Each run's page_offset is set to its
// offset in the file, as PageMap::file() expects.
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

PageMap raw_map(const GTensorHandler& pool, const RawBlockLayout& file, std::span<const int32_t> layers) {
  return PageMap::file(runs_in_file_order(pool, file, layers));
}

}  // namespace flexkv
