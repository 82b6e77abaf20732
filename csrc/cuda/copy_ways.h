// Which way the runs of a piece go, by their length and number. Arithmetic only: no driver.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_plan.h"

namespace flexkv::cuda {

// Unit: bytes. Lengths of run that are told apart: a run counts as the next longer one.
inline constexpr std::array<int64_t, 7> kRunLengths = {4 << 10,  8 << 10,   16 << 10, 32 << 10,
                                                       64 << 10, 128 << 10, 256 << 10};
inline constexpr int64_t kNever = INT64_MAX;

// Of one direction.
struct Ways {
  // Unit: runs. By length, from how many of them in a piece on the kernel takes them; kNever. Longer runs are
  // the copy engine's.
  std::array<int64_t, kRunLengths.size()> kernel_from{};
  // By length, the last also for longer runs: whether rows of equal distance go by cuMemcpy2DAsync where
  // there are batches. The kernel's place is beside those, as blocks that are in use lie anywhere.
  std::array<bool, kRunLengths.size()> rows_first{};

  friend bool operator==(const Ways&, const Ways&) = default;
};

// The place of a run in kRunLengths; its size for a longer one.
size_t length_place(int64_t run_bytes);

// Where nothing was measured.
Ways usual_ways(const Capabilities& capabilities);

// What the copy engine is given for runs that are not the kernel's, where nothing speaks for rows.
Path engine_path(const Capabilities& capabilities);

// The segments of each way, in order. A view may have both: short rows of an index beside long ones of a
// cache.
struct SplitRuns {
  std::vector<Segment> by_kernel, by_engine;
};
SplitRuns split_runs(std::span<const Segment> segments, size_t pages, const Ways& ways);

// Unit: seconds. What `runs` runs of `run_bytes`, at equal distances, took by a path; not above 0: nothing is
// known.
using TimeRuns = std::function<double(Path, int64_t run_bytes, int64_t runs)>;
// The fastest by what is measured, with few runs and with many of each length: a path costs so much a piece
// and so much a run. Runs are taken to lie anywhere, so that the kernel is compared with batches, or with
// single calls where there are none. None where a path that is needed gives no time.
std::optional<Ways> measured_ways(const Capabilities& capabilities, const TimeRuns& time);

// Unit: bytes. The most that a measurement copies at once.
inline constexpr int64_t kMostMeasuredBytes = 4 << 20;

// Unit: bytes. What is enqueued as one on a link of this rate: kPieceS of it, in whole MiB, at least one and
// at most `most`; `most` for a rate of 0, which is not known.
int64_t piece_bytes(double bytes_per_s, int64_t most);
// Unit: seconds. Two pieces are under way: a small copy of the engine's waits for twice that in its
// direction.
inline constexpr double kPieceS = 100e-6;

// "kernel for runs of 4 KiB from 8 runs on, 8 KiB; rows of 64 KiB", in words.
std::string to_string(const Ways& ways);

}  // namespace flexkv::cuda
