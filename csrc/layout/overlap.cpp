#include "layout/overlap.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "layout/kv_view.h"

namespace flexkv {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Blocks (of a, of b) whose runs share a byte, if any. Both strides are positive.
std::optional<std::pair<int64_t, int64_t>> shared_blocks(const Segment& a, const Segment& b,
                                                         int64_t num_blocks, bool same_segment) {
  const auto a_base = static_cast<int64_t>(a.base), b_base = static_cast<int64_t>(b.base);
  // Runs of blocks i and j share a byte iff a + i*S - b_run < b + j*T < a + i*S + a_run: for each i, one
  // range of j.
  const auto j_range = [&](int64_t i) {
    const int64_t at = a_base + i * a.block_stride - b_base;
    const int64_t lo = floor_div(at - b.run_bytes, b.block_stride) + 1;
    const int64_t hi = floor_div(at + a.run_bytes - 1, b.block_stride);
    return std::pair{std::max<int64_t>(lo, 0), std::min(hi, num_blocks - 1)};
  };
  if (a.block_stride == b.block_stride) {
    // Only j - i matters: the difference d shares a byte iff it lies in one range, and |d| < num_blocks.
    const int64_t at = a_base - b_base;
    int64_t lo = std::max(floor_div(at - b.run_bytes, a.block_stride) + 1, 1 - num_blocks);
    const int64_t hi = std::min(floor_div(at + a.run_bytes - 1, a.block_stride), num_blocks - 1);
    if (same_segment) lo = std::max<int64_t>(lo, 1);  // a run always shares bytes with itself
    if (lo > hi) return std::nullopt;
    return lo >= 0 ? std::pair<int64_t, int64_t>{0, lo} : std::pair<int64_t, int64_t>{-lo, 0};
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    const auto [lo, hi] = j_range(i);
    if (lo <= hi) return std::pair{i, lo};
  }
  return std::nullopt;
}

uintptr_t end_of(const Segment& s, int64_t num_blocks) {
  return run_address(s, num_blocks - 1) + static_cast<uintptr_t>(s.run_bytes);
}

}  // namespace

void check_no_overlap(const std::vector<Segment>& segments, int64_t num_blocks) {
  std::vector<Segment> sorted = segments;
  std::sort(sorted.begin(), sorted.end(), [](const Segment& a, const Segment& b) { return a.base < b.base; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    const uintptr_t end = end_of(sorted[i], num_blocks);
    for (size_t j = i; j < sorted.size() && sorted[j].base < end; ++j) {
      if (const auto hit = shared_blocks(sorted[i], sorted[j], num_blocks, i == j)) {
        throw GeometryError("block " + std::to_string(hit->first) + " of " + to_string(sorted[i]) +
                            " and block " + std::to_string(hit->second) + " of " + to_string(sorted[j]) +
                            " share bytes of the pool");
      }
    }
  }
}

}  // namespace flexkv
