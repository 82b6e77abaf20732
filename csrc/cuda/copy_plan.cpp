#include "cuda/copy_plan.h"

#include <algorithm>

#include "base/align.h"

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

int64_t portion_bytes(int64_t bytes, int64_t most) {
  constexpr int64_t kStep = 64 << 10;
  most = std::max(kStep, most / kStep * kStep);
  const int64_t portions = std::max<int64_t>(1, (bytes + most - 1) / most);
  return std::min(most, round_up((bytes + portions - 1) / portions, kStep));
}

std::vector<std::vector<Segment>> cut_to_portions(std::span<const Segment> segments, int64_t max_bytes) {
  std::vector<std::vector<Segment>> portions(1);
  int64_t room = max_bytes;
  for (Segment rest : segments) {
    while (rest.run_bytes > 0) {
      if (room == 0) {
        portions.emplace_back();
        room = max_bytes;
      }
      Segment& part = portions.back().emplace_back(rest);
      part.run_bytes = std::min(rest.run_bytes, room);
      room -= part.run_bytes;
      rest.base += static_cast<uintptr_t>(part.run_bytes);
      rest.page_offset += part.run_bytes;
      rest.run_bytes -= part.run_bytes;
    }
  }
  return portions;
}

std::vector<Copy> list_copies(std::span<const Segment> segments, std::span<const PageEnds> pages) {
  std::vector<Copy> copies;
  copies.reserve(segments.size() * pages.size());
  for (const PageEnds& page : pages) {
    uintptr_t region = 0;
    int64_t stride = 0;  // of the region's blocks
    for (const Segment& segment : segments) {
      if (segment.run_bytes <= 0) continue;
      if (segment.base < region || segment.base - region >= static_cast<uintptr_t>(stride)) {
        region = segment.base;
        stride = segment.block_stride;
      }
      const Copy copy{run_address(segment, page.block), page.stripe + segment.page_offset,
                      static_cast<size_t>(segment.run_bytes), page.piece, region};
      if (!copies.empty() && copies.back().piece == copy.piece && copies.back().region == copy.region &&
          copies.back().device + copies.back().bytes == copy.device &&
          copies.back().host + copies.back().bytes == copy.host) {
        copies.back().bytes += copy.bytes;
      } else {
        copies.push_back(copy);
      }
    }
  }
  return copies;
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
