#include "layout/kv_view.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/error.h"
#include "layout/overlap.h"

namespace flexkv {
namespace {

// Unit: bytes. The maximum size of a pool. The sum of two sizes up to this limit still fits in 64 bits.
constexpr int64_t kMaxSpanBytes = int64_t{1} << 56;
// Unit: layers. The maximum number of layers. When a view is attached, a table with one entry per layer is
// allocated. Without a limit, the table for a wrong layer number could need gigabytes.
constexpr int32_t kMaxLayers = 1 << 16;

void check_sizes(const Segment& run, int64_t num_blocks) {
  if (run.base == 0) throw GeometryError(to_string(run) + ": the base address is 0");
  if (run.run_bytes <= 0) throw GeometryError(to_string(run) + ": run_bytes must be positive");
  if (run.block_stride <= 0) throw GeometryError(to_string(run) + ": block_stride must be positive");
  if (run.page_offset < 0) throw GeometryError(to_string(run) + ": page_offset must not be negative");
  if (run.layer < 0 || run.layer >= kMaxLayers) {
    throw GeometryError(to_string(run) + ": layer must be in [0, " + std::to_string(kMaxLayers) + ")");
  }
  if (run.run_bytes > kMaxSpanBytes || run.block_stride > kMaxSpanBytes / num_blocks ||
      run.base > static_cast<uintptr_t>(std::numeric_limits<int64_t>::max() - 2 * kMaxSpanBytes)) {
    throw GeometryError(to_string(run) + ": " + std::to_string(num_blocks) +
                        " blocks exceed the address space");
  }
}

}  // namespace

KvView::KvView(std::vector<Segment> runs, int64_t num_blocks, int64_t stripe_bytes, int64_t first_block)
    : runs_(std::move(runs)),
      num_blocks_(num_blocks),
      stripe_bytes_(stripe_bytes),
      first_block_(first_block) {
  std::sort(runs_.begin(), runs_.end(),
            [](const Segment& a, const Segment& b) { return a.page_offset < b.page_offset; });
  check();
  segments_ = coalesce(runs_);
  for (const Segment& run : runs_) num_layers_ = std::max(num_layers_, run.layer + 1);
}

std::vector<Segment> KvView::segments_of_layers(int32_t lo, int32_t hi) const {
  if (lo < 0 || lo >= hi || hi > num_layers_) {
    throw BlockRangeError("layers [" + std::to_string(lo) + ", " + std::to_string(hi) +
                          "): allowed are non-empty ranges within [0, " + std::to_string(num_layers_) + ")");
  }
  std::vector<Segment> chosen;
  std::copy_if(runs_.begin(), runs_.end(), std::back_inserter(chosen),
               [=](const Segment& run) { return run.layer >= lo && run.layer < hi; });
  return coalesce(chosen);
}

void KvView::require_block(int64_t block, const char* what) const {
  if (has_block(block)) return;
  throw BlockRangeError(std::string(what) + " " + std::to_string(block) + ": the pool has blocks [" +
                        std::to_string(first_block_) + ", " + std::to_string(num_blocks_) + ")");
}

void KvView::check() const {
  if (runs_.empty()) throw GeometryError("a view needs at least one run");
  if (num_blocks_ <= 0) {
    throw GeometryError("num_blocks is " + std::to_string(num_blocks_) + ": must be positive");
  }
  if (first_block_ < 0 || first_block_ >= num_blocks_) {
    throw GeometryError("first_block is " + std::to_string(first_block_) + ": allowed is [0, " +
                        std::to_string(num_blocks_) + ")");
  }
  int64_t filled = 0;
  for (const Segment& run : runs_) {
    check_sizes(run, num_blocks_);
    if (run.page_offset != filled) {
      throw GeometryError(to_string(run) + ": " +
                          (run.page_offset < filled ? "overlaps" : "leaves a gap after") +
                          " the run before it, which ends at page offset " + std::to_string(filled));
    }
    filled += run.run_bytes;
    if (filled > kMaxSpanBytes)
      throw GeometryError(to_string(run) + ": the stripe exceeds the address space");
  }
  if (filled != stripe_bytes_) {
    throw GeometryError("the runs fill " + std::to_string(filled) + " bytes of a stripe of " +
                        std::to_string(stripe_bytes_));
  }
  check_no_overlap(coalesce(runs_), num_blocks_);
}

std::vector<Segment> coalesce(const std::vector<Segment>& runs) {
  std::vector<Segment> merged;
  for (const Segment& run : runs) {
    if (!merged.empty() && continues(merged.back(), run)) {
      merged.back().run_bytes += run.run_bytes;
      merged.back().layer = std::min(merged.back().layer, run.layer);
    } else {
      merged.push_back(run);
    }
  }
  return merged;
}

std::string to_string(const Segment& segment) {
  return "segment(layer " + std::to_string(segment.layer) + ", base " + std::to_string(segment.base) +
         ", stride " + std::to_string(segment.block_stride) + ", " + std::to_string(segment.run_bytes) +
         " bytes at page offset " + std::to_string(segment.page_offset) + ")";
}

}  // namespace flexkv
