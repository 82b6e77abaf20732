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
  if (const auto& measured = capabilities.measured_below[static_cast<size_t>(direction)]) return *measured;
  if (direction == Direction::kToHost) return INT64_MAX;
  return capabilities.batch ? kLoadKernelBelowBytes : kLoadKernelBelowBytesWithoutBatch;
}

std::string describe_ways(const Capabilities& capabilities, Direction direction) {
  const int64_t below = kernel_below(capabilities, direction);
  const int multiprocessors = kKernelMultiprocessors[static_cast<size_t>(direction)];
  std::string ways;
  if (below > 0) {
    const std::string runs = below == INT64_MAX ? "all runs of registered memory"
                                                : "runs below " + std::to_string(below >> 10) + " KiB";
    ways = "kernel for " + runs + ", " + std::to_string(multiprocessors) +
           (multiprocessors == 1 ? " multiprocessor" : " multiprocessors") + "; others ";
  }
  return ways + (capabilities.batch ? "in batches" : "one by one");
}

}  // namespace flexkv::cuda
