#include "cuda/copy_ways.h"

#include <algorithm>

namespace flexkv::cuda {

SplitRuns split_runs(std::span<const Segment> segments, int64_t kernel_below) {
  SplitRuns split;
  for (const Segment& segment : segments) {
    (segment.run_bytes < kernel_below ? split.by_kernel : split.by_engine).push_back(segment);
  }
  return split;
}

int64_t kernel_below(const Capabilities& capabilities, Direction direction) {
  if (!capabilities.kernel) return 0;
  return capabilities.batch ? kKernelBelowBytes[static_cast<size_t>(direction)]
                            : kKernelBelowBytesWithoutBatch;
}

EngineWay engine_way(const Capabilities& capabilities, Direction direction, std::span<const Segment> runs) {
  if (direction == Direction::kToDevice) return {};
  int64_t longest = 0;
  for (const Segment& run : runs) longest = std::max(longest, run.run_bytes);
  if (longest >= (capabilities.batch ? kAloneBytes : kStoreCopyBytes + 1)) return {kPortionBytes, true};
  return {capabilities.batch ? kStoreCopyBytes : kPortionBytes, false};
}

std::string describe_ways(const Capabilities& capabilities, Direction direction) {
  const int64_t below = kernel_below(capabilities, direction);
  const int multiprocessors = kKernelMultiprocessors[static_cast<size_t>(direction)];
  std::string ways;
  if (below > 0) {
    ways = "kernel for runs below " + std::to_string(below >> 10) + " KiB, " +
           std::to_string(multiprocessors) + (multiprocessors == 1 ? " multiprocessor" : " multiprocessors") +
           "; others ";
  }
  return ways + (capabilities.batch                 ? "in batches"
                 : capabilities.max_pitch_bytes > 0 ? "in rows"
                                                    : "one by one");
}

}  // namespace flexkv::cuda
