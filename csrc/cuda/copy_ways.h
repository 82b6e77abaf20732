// Whether the kernel or the copy engine copies a run, by its length, and how much is copied at a time. The
// constants come from measurements on an H200 (PCIe 5 x16, driver 580); docs/gpu.md has the figures. Lengths
// that were measured on this GPU (`transfer.ways_file`) take precedence over those built in here.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_plan.h"

namespace flexkv::cuda {

// Unit: bytes. The kernel loads runs shorter than this. The copy engine, which costs the engine's
// kernels nothing, copies all runs for which a thread can make its batches fast enough. The kernel stores
// runs of any length: beside batches of stores vLLM's steps took 1.36 times as long, beside the kernel 1.09.
// The probable cause is that the engine's driver calls wait for a thread that gives the driver many copies.
inline constexpr int64_t kLoadKernelBelowBytes = 64 << 10;
// The limit if each run needs its own call: a call costs about 2 us whatever its length, in which PCIe 5
// moves 100 KiB. Source: published block-copy rates on an H100, where runs of 64 KiB reach 14.5 GB/s by
// single calls and 42 by kernel, and runs of 512 KiB 39.5 and 47.
inline constexpr int64_t kLoadKernelBelowBytesWithoutBatch = 512 << 10;

// Unit: multiprocessors. Just enough to fill the link, for loads and for stores. More bring no gain and slow
// the engine's step: a store on two made it 2.8 times as long, a store on eight 4.6 times.
inline constexpr std::array<int, 2> kKernelMultiprocessors = {2, 1};

// Unit: portions. How many a stream has under way if items take turns, for loads and for stores: while one
// moves, the next are queued. Portions of an op that the engine's stream is ordered behind are not counted.
inline constexpr std::array<size_t, 2> kPortionsUnderWay = {2, 3};
// Unit: launches. How many kernels a stream has under way; an op that the engine's stream is ordered behind
// waits for them.
inline constexpr size_t kLaunchesUnderWay = 2;
// Unit: bytes, copies. The largest portion for the copy engine, for loads and for stores. A small copy of the
// engine's to the host, with which each of its steps ends, waits for one portion of a store: 0.05 ms, and 0.1
// with portions twice as large.
inline constexpr std::array<int64_t, 2> kPortionBytes = {4 << 20, 2 << 20};
inline constexpr size_t kPortionCopies = 256;
// Unit: bytes. Longer copies to the host are cut, which lets the copy engine turn to another stream between
// two of them: behind two copies of several MiB, small copies of the engine waited 10 to 370 ms. Shorter
// copies bring no gain, and a thread that shares its core then makes calls for only 33 GB/s instead of 50.
inline constexpr int64_t kStoreCopyBytes = 64 << 10;

// Unit: bytes. The most that one kernel copies: the first kernel of an op, and the others. The first is small
// so that it starts soon; the next tables are made while it runs. The others are large, so that there are few
// of them, because each waits for a multiprocessor while a large matrix product runs.
inline constexpr int64_t kFirstLaunchBytes = 4 << 20;
inline constexpr int64_t kLaunchBytes = 64 << 20;
// Unit: bytes. The most that one kernel copies of a load whose layers are waited for one by one. It keeps its
// multiprocessors from layer to layer, whereas a kernel per layer would have to wait for one each time. Loads
// that take turns share this limit, so that their first layers arrive within 3 ms of each other.
inline constexpr int64_t kLayersLaunchBytes = 128 << 20;
// Unit: pages. The number of pages that the tables have room for.
inline constexpr size_t kLaunchPages = 8192;
// Unit: bytes. Smaller layers of a layerwise op are copied together: enqueueing one costs about 10 us, in
// which the link moves this much.
inline constexpr int64_t kLeastRangeBytes = 512 << 10;

// The segments that go each way, in order. A view may have both: short rows of an index beside long ones of a
// cache.
struct SplitRuns {
  std::vector<Segment> by_kernel, by_engine;
};
SplitRuns split_runs(std::span<const Segment> segments, int64_t kernel_below);

// Unit: bytes. The kernel copies shorter runs; 0: it copies none.
int64_t kernel_below(const Capabilities& capabilities, Direction direction);

// A description, such as "kernel for runs below 64 KiB, 2 multiprocessors; others in batches".
std::string describe_ways(const Capabilities& capabilities, Direction direction);

}  // namespace flexkv::cuda
