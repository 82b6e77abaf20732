#include "cuda/copy_ways.h"

#include <algorithm>
#include <cmath>

#include "transfer/sub_batch.h"

namespace flexkv::cuda {
namespace {

// Unit: runs. Of the two measurements of each length; the second at most, and within kMostMeasuredBytes.
constexpr int64_t kFewRuns = 4;
constexpr int64_t kManyRuns = 512;
// The kernel takes multiprocessors from the engine, rows need a look at all copies of a piece: each must be
// that much faster.
constexpr double kKernelShare = 0.9;
constexpr double kRowsShare = 0.95;
constexpr int64_t kMiB = int64_t{1} << 20;

// Unit: seconds. What a path takes for n runs: piece + n * run.
struct Cost {
  double piece = 0;
  double run = 0;
  double of(int64_t runs) const { return piece + run * static_cast<double>(runs); }
};

std::optional<Cost> cost_of(Path path, int64_t run_bytes, int64_t many, const TimeRuns& time) {
  const double few_s = time(path, run_bytes, kFewRuns);
  const double many_s = time(path, run_bytes, many);
  if (few_s <= 0 || many_s <= 0) return std::nullopt;
  const double run = std::max(0.0, (many_s - few_s) / static_cast<double>(many - kFewRuns));
  return Cost{std::max(0.0, few_s - run * kFewRuns), run};
}

// The fewest runs for which the kernel takes at most kKernelShare of the engine's time. `most`: that a piece
// may have.
int64_t kernel_from(const Cost& kernel, const Cost& engine, int64_t most) {
  const double piece = kernel.piece - kKernelShare * engine.piece;
  const double run = kernel.run - kKernelShare * engine.run;
  if (run >= 0) return piece + run * static_cast<double>(most) <= 0 ? 1 : kNever;
  const double least = std::ceil(-piece / run);
  return least <= 1 ? 1 : least < 1e9 ? static_cast<int64_t>(least) : kNever;
}

std::string in_kib(int64_t bytes) { return std::to_string(bytes >> 10) + " KiB"; }

}  // namespace

size_t length_place(int64_t run_bytes) {
  return static_cast<size_t>(std::lower_bound(kRunLengths.begin(), kRunLengths.end(), run_bytes) -
                             kRunLengths.begin());
}

Ways usual_ways(const Capabilities& capabilities) {
  const int64_t longest = capabilities.batch ? kKernelUpToBytesWithBatch : kKernelUpToBytes;
  Ways ways;
  for (size_t i = 0; i < kRunLengths.size(); ++i) {
    ways.kernel_from[i] = capabilities.kernel && kRunLengths[i] <= longest ? 1 : kNever;
  }
  return ways;
}

Path engine_path(const Capabilities& capabilities) {
  if (capabilities.batch) return Path::kBatch;
  return capabilities.max_pitch_bytes > 0 ? Path::kPitched : Path::kSingle;
}

SplitRuns split_runs(std::span<const Segment> segments, size_t pages, const Ways& ways) {
  std::array<int64_t, kRunLengths.size() + 1> runs{};
  for (const Segment& segment : segments) {
    runs[length_place(segment.run_bytes)] += static_cast<int64_t>(pages);
  }
  SplitRuns split;
  for (const Segment& segment : segments) {
    const size_t place = length_place(segment.run_bytes);
    const bool by_kernel = place < kRunLengths.size() && runs[place] >= ways.kernel_from[place];
    (by_kernel ? split.by_kernel : split.by_engine).push_back(segment);
  }
  return split;
}

std::optional<Ways> measured_ways(const Capabilities& capabilities, const TimeRuns& time) {
  Ways ways = usual_ways(capabilities);
  const Path anywhere = capabilities.batch ? Path::kBatch : Path::kSingle;
  const bool rows_too = capabilities.batch && capabilities.max_pitch_bytes > 0;
  for (size_t i = 0; i < kRunLengths.size(); ++i) {
    const int64_t length = kRunLengths[i];
    const int64_t many = std::min(kManyRuns, kMostMeasuredBytes / length);
    const std::optional<Cost> engine = cost_of(anywhere, length, many, time);
    if (!engine) return std::nullopt;
    if (const auto rows = rows_too ? cost_of(Path::kPitched, length, many, time) : std::nullopt; rows) {
      ways.rows_first[i] = rows->of(many) <= kRowsShare * engine->of(many);
    }
    if (!capabilities.kernel) continue;
    const auto kernel = cost_of(Path::kKernel, length, many, time);
    if (!kernel) return std::nullopt;
    ways.kernel_from[i] = kernel_from(*kernel, *engine, kSubBatchBytes / length);
  }
  return ways;
}

int64_t piece_bytes(double bytes_per_s, int64_t most) {
  if (bytes_per_s <= 0) return most;
  const double fits = std::floor(bytes_per_s * kPieceS / static_cast<double>(kMiB));
  return std::clamp(static_cast<int64_t>(std::min(fits, 1e6)) * kMiB, std::min(kMiB, most), most);
}

std::string to_string(const Ways& ways) {
  std::string kernel, rows;
  for (size_t i = 0; i < kRunLengths.size(); ++i) {
    const int64_t from = ways.kernel_from[i];
    if (from != kNever) {
      kernel += (kernel.empty() ? "" : ", ") + in_kib(kRunLengths[i]);
      if (from > 1) kernel += " from " + std::to_string(from) + " runs on";
    }
    if (ways.rows_first[i]) rows += (rows.empty() ? "" : ", ") + in_kib(kRunLengths[i]);
  }
  return "kernel for runs of " + (kernel.empty() ? "no length" : kernel) +
         (rows.empty() ? "" : "; rows of " + rows);
}

}  // namespace flexkv::cuda
