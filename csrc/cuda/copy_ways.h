// Decides, from the length of a run, whether the copy kernel or the GPU's copy engine copies the run. Also
// decides how much is copied at a time. The constants come from measurements on an H200 (PCIe 5 x16, driver
// 580); docs/gpu.md has the figures. Lengths that were measured on the user's GPU (`transfer.ways_file`) take
// precedence over the constants in this file.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_plan.h"

namespace flexkv::cuda {

// Unit: bytes. For loads, the kernel copies runs that are shorter than this, provided that batched copies
// work. The copy engine copies all longer runs, because it takes no time from the inference engine's kernels.
// With runs of this length, one thread can enqueue batches as fast as the link moves them. For stores, the
// kernel copies runs of any length. While the copy engine stored pages in batches, vLLM's steps took 1.36
// times as long as without stores. While the kernel stored the pages, the steps took 1.09 times as long. The
// probable cause is that the inference engine's driver calls wait while another thread passes many copies to
// the driver.
inline constexpr int64_t kLoadKernelBelowBytes = 64 << 10;
// Unit: bytes. Replaces kLoadKernelBelowBytes if each run needs its own driver call. A call takes about 2 us,
// independent of the copy's length, and in that time PCIe 5 moves 100 KiB. The length comes from published
// block-copy rates on an H100: runs of 64 KiB reach 14.5 GB/s with single calls and 42 GB/s with a kernel;
// runs of 512 KiB reach 39.5 GB/s and 47 GB/s.
inline constexpr int64_t kLoadKernelBelowBytesWithoutBatch = 512 << 10;

// How many multiprocessors the kernel uses for loads and for stores: just enough to use all of the link's
// bandwidth. More multiprocessors bring no gain and slow down the inference engine's step: a store with two
// multiprocessors made a step 2.8 times as long, and a store with eight made it 4.6 times as long.
inline constexpr std::array<int, 2> kKernelMultiprocessors = {2, 1};

// Unit: portions. The maximum number of portions for the copy engine that a stream has in flight, for loads
// and for stores. While one portion is copied, the others are queued, so the copy engine does not have to
// wait for the thread. An op that the inference engine's stream waits for is enqueued without regard to this
// limit.
inline constexpr std::array<size_t, 2> kPortionsInFlight = {2, 3};
// Unit: launches. The maximum number of copy kernels that a stream has in flight. An op that the inference
// engine's stream waits for must itself wait until these kernels have ended.
inline constexpr size_t kLaunchesInFlight = 2;
// Unit: bytes. The maximum size of a portion for the copy engine, for loads and for stores. Each step of the
// inference engine ends with a small copy to the host, which may have to wait for one portion of a store.
// This takes 0.05 ms; it would take 0.1 ms if portions were twice as large.
inline constexpr std::array<int64_t, 2> kPortionBytes = {4 << 20, 2 << 20};
// Unit: copies. The maximum number of copies in a portion, even if the copies are short.
inline constexpr size_t kPortionCopies = 256;
// Unit: bytes. Longer copies to the host are cut into copies of this length, so that the copy engine can
// serve another stream between two copies. Behind two copies of several MiB, small copies of the inference
// engine waited 10 to 370 ms. A smaller length brings no gain: with it, a thread that shares its CPU core
// could enqueue only 33 GB/s instead of 50.
inline constexpr int64_t kStoreCopyBytes = 64 << 10;

// Unit: bytes. The maximum that the first kernel of an op copies, and the maximum for each later kernel. The
// first kernel copies little, so that it starts soon; while it runs, the thread makes the tables of the next
// kernel. The later kernels copy much, so that there are few of them: each kernel has to wait for a
// multiprocessor while a large matrix product runs.
inline constexpr int64_t kFirstLaunchBytes = 4 << 20;
inline constexpr int64_t kLaunchBytes = 64 << 20;
// Unit: bytes. The maximum that one kernel copies of a layerwise load. The inference engine waits for the
// layers of a layerwise load one by one. A kernel that copies several layers keeps its multiprocessors from
// layer to layer. With one kernel per layer, each kernel would have to wait for a multiprocessor. Layerwise
// loads that take turns share this limit, so that the first layers of all of them arrive within 3 ms of each
// other.
inline constexpr int64_t kLayersLaunchBytes = 128 << 20;
// Unit: pages. The maximum number of pages per launch, because the tables of a launch have no space for more.
inline constexpr size_t kLaunchPages = 8192;
// Unit: bytes. Layers of a layerwise op that are smaller than this are copied together: enqueuing a copy
// takes about 10 us, and in that time the link moves this many bytes.
inline constexpr int64_t kLeastRangeBytes = 512 << 10;

// A view's segments, divided into those that the kernel copies and those that the copy engine copies. In each
// list, the segments have the same order as in the view. A view may have segments of both kinds: for example,
// the short rows of an index and the long rows of a cache.
struct SplitRuns {
  std::vector<Segment> by_kernel, by_engine;
};
SplitRuns split_runs(std::span<const Segment> segments, int64_t kernel_below);

// Unit: bytes. The kernel copies runs that are shorter than the returned length. It is 0 if the kernel copies
// no runs.
int64_t kernel_below(const Capabilities& capabilities, Direction direction);

// Returns a description, such as "kernel for runs below 64 KiB, 2 multiprocessors; others in batches".
std::string describe_ways(const Capabilities& capabilities, Direction direction);

}  // namespace flexkv::cuda
