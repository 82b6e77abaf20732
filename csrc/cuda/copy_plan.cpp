#include "cuda/copy_plan.h"

#include <algorithm>

namespace flexkv::cuda {
namespace {

// Rows of equal length and steps, taken greedily in the order given.
std::vector<PitchedCopy> group_in_order(std::span<const Copy> copies, size_t max_pitch_bytes) {
  std::vector<PitchedCopy> groups;
  for (const Copy& copy : copies) {
    if (!groups.empty()) {
      PitchedCopy& group = groups.back();
      const uintptr_t device_end = group.first.device + (group.rows - 1) * group.device_step;
      const std::byte* host_end = group.first.host + (group.rows - 1) * group.host_step;
      const bool together = copy.piece == group.first.piece && copy.region == group.first.region;
      if (together && copy.bytes == group.first.bytes && copy.device > device_end && copy.host > host_end) {
        const size_t device_step = copy.device - device_end;
        const auto host_step = static_cast<size_t>(copy.host - host_end);
        const bool first_step = group.rows == 1 && device_step >= copy.bytes && host_step >= copy.bytes &&
                                device_step <= max_pitch_bytes && host_step <= max_pitch_bytes;
        if (first_step) {
          group.device_step = device_step;
          group.host_step = host_step;
        }
        if (first_step ||
            (group.rows > 1 && device_step == group.device_step && host_step == group.host_step)) {
          ++group.rows;
          continue;
        }
      }
    }
    groups.push_back({copy, 1, 0, 0});
  }
  return groups;
}

}  // namespace

const char* to_string(Path path) {
  static constexpr const char* kNames[kPaths] = {"kernel", "batch", "pitched", "single"};
  return kNames[static_cast<int>(path)];
}

CopyLister::CopyLister(std::span<const Segment> segments, std::span<const PageEnds> pages, int64_t longest)
    : segments_(segments), pages_(pages), longest_(longest) {
  uintptr_t region = 0;
  int64_t stride = 0;  // of the region's blocks
  for (const Segment& segment : segments) {
    if (segment.base < region || segment.base - region >= static_cast<uintptr_t>(stride)) {
      region = segment.base;
      stride = segment.block_stride;
    }
    regions_.push_back(region);
  }
  skip_empty();
}

void CopyLister::skip_empty() {
  while (!ended()) {
    for (; segment_ < segments_.size(); ++segment_, offset_ = 0) {
      if (offset_ < segments_[segment_].run_bytes) return;
    }
    ++page_;
    segment_ = 0;
  }
}

Copy CopyLister::run_from_here() const {
  const Segment& segment = segments_[segment_];
  const PageEnds& page = pages_[page_];
  return {run_address(segment, page.block) + static_cast<uintptr_t>(offset_),
          page.stripe + segment.page_offset + offset_, static_cast<size_t>(segment.run_bytes - offset_),
          page.piece, regions_[segment_]};
}

void CopyLister::go_on(int64_t bytes) {
  offset_ += bytes;
  skip_empty();
}

int64_t CopyLister::next(int64_t most_bytes, size_t most_copies, std::vector<Copy>& copies) {
  copies.clear();
  int64_t room = most_bytes;
  while (!ended() && room > 0) {
    Copy run = run_from_here();
    const bool joins = !copies.empty() && copies.back().piece == run.piece &&
                       copies.back().region == run.region &&
                       copies.back().device + copies.back().bytes == run.device &&
                       copies.back().host + copies.back().bytes == run.host &&
                       copies.back().bytes < static_cast<size_t>(longest_);
    if (!joins && copies.size() == most_copies) break;
    const auto before = joins ? static_cast<int64_t>(copies.back().bytes) : 0;
    const int64_t bytes = std::min({static_cast<int64_t>(run.bytes), longest_ - before, room});
    if (joins) {
      copies.back().bytes += static_cast<size_t>(bytes);
    } else {
      run.bytes = static_cast<size_t>(bytes);
      copies.push_back(run);
    }
    room -= bytes;
    go_on(bytes);
  }
  return most_bytes - room;
}

std::vector<PitchedCopy> group_rows(std::span<const Copy> copies, size_t max_pitch_bytes) {
  std::vector<PitchedCopy> by_page = group_in_order(copies, max_pitch_bytes);
  std::vector<Copy> ascending(copies.begin(), copies.end());
  std::sort(ascending.begin(), ascending.end(),
            [](const Copy& a, const Copy& b) { return a.device < b.device; });
  std::vector<PitchedCopy> by_run = group_in_order(ascending, max_pitch_bytes);
  return by_run.size() < by_page.size() ? by_run : by_page;
}

}  // namespace flexkv::cuda
