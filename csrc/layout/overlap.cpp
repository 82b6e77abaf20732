#include "layout/overlap.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

// A segment, the number of blocks of its view, and the view's number (0 or 1).
struct Area {
  const Segment* segment;
  int64_t blocks;
  int view;

  int64_t base() const { return static_cast<int64_t>(segment->base); }
  int64_t end() const { return base() + (blocks - 1) * segment->block_stride + segment->run_bytes; }
};

struct Hit {
  int64_t a_block, b_block;
};

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Throws GeometryError. The error message names the block of view 0 first, even if `a` belongs to view 1.
[[noreturn]] void refuse(const Area& a, const Area& b, const Hit& hit) {
  if (a.view > b.view) refuse(b, a, {hit.b_block, hit.a_block});
  throw GeometryError("block " + std::to_string(hit.a_block) + " of " + to_string(*a.segment) +
                      " and block " + std::to_string(hit.b_block) + " of " + to_string(*b.segment) +
                      " share bytes of the pool");
}

// Returns two blocks that share a byte, one of each area, or nothing if there are no such blocks. The areas
// may have any strides. If the areas belong to different views, two blocks with equal numbers may share
// bytes, so they are not returned.
std::optional<Hit> shared_blocks(const Area& a, const Area& b) {
  // Let a and b be the bases of the areas, and S and T their strides. The runs of blocks i and j share a byte
  // if and only if a + i*S - b_run < b + j*T < a + i*S + a_run. So the blocks j that share bytes with a given
  // block i form one range.
  for (int64_t i = 0; i < a.blocks; ++i) {
    const int64_t at = a.base() + i * a.segment->block_stride - b.base();
    int64_t lo = std::max<int64_t>(floor_div(at - b.segment->run_bytes, b.segment->block_stride) + 1, 0);
    const int64_t hi =
        std::min(floor_div(at + a.segment->run_bytes - 1, b.segment->block_stride), b.blocks - 1);
    if (a.view != b.view && lo == i) ++lo;
    if (lo <= hi) return Hit{i, lo};
  }
  return std::nullopt;
}

// Checks areas that all have one stride S. The byte at address x lies at residue x mod S of row x / S, and
// block i of an area lies i rows after block 0. So two areas share a byte if and only if their residues
// overlap and their rows differ by less than their numbers of blocks. The algorithm is a sweep over the
// residues. The areas that contain the current residue are kept sorted by row. Those of them that belong to
// the same view do not overlap, so each area is compared only with its neighbours in that order.
class SameStride {
 public:
  SameStride(int64_t stride, std::vector<Area> areas) : stride_(stride), areas_(std::move(areas)) {}

  void check() {
    for (size_t i = 0; i < areas_.size(); ++i) {
      const Area& area = areas_[i];
      if (area.segment->run_bytes > stride_ && area.blocks > 1) refuse(area, area, {0, 1});
      add(i);
    }
    std::sort(edges_.begin(), edges_.end());
    for (const Edge& edge : edges_) edge.starts ? enter(edge) : leave(edge);
  }

 private:
  struct Edge {
    int64_t residue;
    // Edges that are ends sort first: an area that ends at a residue does not overlap an area that starts
    // there.
    bool starts;
    int64_t row;
    size_t area;
    bool operator<(const Edge& other) const {
      return std::pair(residue, starts) < std::pair(other.residue, other.starts);
    }
  };

  // Adds the two edges of an area's run. A run that passes the end of its row continues at the start of the
  // next row; then two more edges are added.
  void add(size_t i) {
    const Area& area = areas_[i];
    const int64_t row = floor_div(area.base(), stride_);
    const int64_t from = area.base() - row * stride_;
    const int64_t to = from + area.segment->run_bytes;
    edges_.push_back({from, true, row, i});
    edges_.push_back({std::min(to, stride_), false, row, i});
    if (to > stride_) {
      edges_.push_back({0, true, row + 1, i});
      edges_.push_back({to - stride_, false, row + 1, i});
    }
  }

  void enter(const Edge& edge) {
    const Area& mine = areas_[edge.area];
    for (int view = 0; view < 2; ++view) {
      // The loop visits the areas whose first row is one of the rows of `mine`, and the earlier areas whose
      // blocks may reach the first row of `mine`.
      const auto& under = under_[view];
      for (auto at = under.lower_bound(edge.row - most_blocks_[view] + 1);
           at != under.end() && at->first < edge.row + mine.blocks; ++at) {
        const Area& other = areas_[at->second];
        const int64_t apart = at->first - edge.row;  // block i of `mine` overlaps block i - apart of `other`
        if (apart <= -other.blocks || apart >= mine.blocks) continue;
        if (view != mine.view && apart == 0) continue;
        refuse(mine, other, apart >= 0 ? Hit{apart, 0} : Hit{0, -apart});
      }
    }
    under_[mine.view].emplace(edge.row, edge.area);
    most_blocks_[mine.view] = std::max(most_blocks_[mine.view], mine.blocks);
  }

  void leave(const Edge& edge) {
    auto& under = under_[areas_[edge.area].view];
    for (auto [at, end] = under.equal_range(edge.row); at != end; ++at) {
      if (at->second != edge.area) continue;
      under.erase(at);
      return;
    }
  }

  const int64_t stride_;
  const std::vector<Area> areas_;
  std::vector<Edge> edges_;
  std::multimap<int64_t, size_t> under_[2];  // for each view: row of block 0 -> index of the area
  int64_t most_blocks_[2] = {1, 1};
};

void check(const std::vector<Area>& all, bool within_views) {
  std::map<int64_t, std::vector<Area>> by_stride;
  for (const Area& area : all) {
    // A single block has no stride, so any stride that is at least as large as its run will do.
    const int64_t stride = area.blocks == 1 ? std::max(area.segment->block_stride, area.segment->run_bytes)
                                            : area.segment->block_stride;
    by_stride[stride].push_back(area);
  }
  for (auto& [stride, areas] : by_stride) SameStride(stride, areas).check();
  if (by_stride.size() == 1) return;

  // Compares areas of different strides in a sweep over their start addresses. `under` has, for each stride,
  // the areas that start before the current area and end after its start.
  std::vector<std::pair<int64_t, Area>> sorted;
  for (const auto& [stride, areas] : by_stride) {
    for (const Area& area : areas) sorted.emplace_back(stride, area);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.base() < b.second.base(); });
  std::map<int64_t, std::multimap<int64_t, Area>> under;  // stride -> end address -> area
  for (const auto& [stride, area] : sorted) {
    for (auto& [other_stride, others] : under) {
      others.erase(others.begin(), others.upper_bound(area.base()));
      if (other_stride == stride) continue;
      for (const auto& [end, other] : others) {
        if (!within_views && other.view == area.view) continue;
        if (const auto hit = shared_blocks(area, other)) refuse(area, other, *hit);
      }
    }
    under[stride].emplace(area.end(), area);
  }
}

}  // namespace

void check_no_overlap(const std::vector<Segment>& segments, int64_t num_blocks) {
  std::vector<Area> areas;
  for (const Segment& segment : segments) areas.push_back({&segment, num_blocks, 0});
  check(areas, true);
}

void check_same_blocks_only(const KvView& a, const KvView& b) {
  std::vector<Area> areas;
  for (const Segment& segment : a.segments()) areas.push_back({&segment, a.num_blocks(), 0});
  for (const Segment& segment : b.segments()) areas.push_back({&segment, b.num_blocks(), 1});
  check(areas, false);
}

}  // namespace flexkv
