#include "cuda/copy_plan.h"

#include <algorithm>

namespace flexkv::cuda {

const char* to_string(Path path) {
  static constexpr const char* kNames[kPaths] = {"kernel", "batch", "single"};
  return kNames[static_cast<int>(path)];
}

CopyLister::CopyLister(std::span<const Segment> segments, std::span<const PageEnds> pages, int64_t longest)
    : segments_(segments), pages_(pages), longest_(longest) {
  uintptr_t region = 0;
  int64_t stride = 0;  // in bytes: distance between the region's blocks
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

}  // namespace flexkv::cuda
