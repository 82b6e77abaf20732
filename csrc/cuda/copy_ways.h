// Decides by the length of a run whether the copy kernel or the GPU's copy engine copies it, and how much is
// copied at a time. The constants come from measurements on an H200 (PCIe 5 x16, driver 580); docs/gpu.md has
// the figures. Lengths that were measured on the user's GPU (`transfer.ways_file`) take precedence over those
// built in here.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_plan.h"

namespace flexkv::cuda {

// Unit: bytes. For loads, the kernel copies runs shorter than this if batched copies work. The copy engine
// copies all longer runs, because it takes no time from the inference engine's kernels. With runs of this
// length, one thread can enqueue batches as fast as the link moves them. For stores, the kernel copies runs
// of any length. While pages were stored in batches, vLLM's steps took 1.36 times as long as without stores;
// while the kernel stored them, 1.09 times. The probable cause is that the inference engine's driver calls
// wait while another thread passes many copies to the driver.
inline constexpr int64_t kLoadKernelBelowBytes = 64 << 10;
// Unit: bytes. Replaces kLoadKernelBelowBytes if each run needs its own driver call. A call costs about 2 us
// whatever its length, and in that time PCIe 5 moves 100 KiB. Source: published block-copy rates on an H100.
// Runs of 64 KiB reach 14.5 GB/s with single calls and 42 GB/s with a kernel; runs of 512 KiB reach 39.5 and
// 47 GB/s.
inline constexpr int64_t kLoadKernelBelowBytesWithoutBatch = 512 << 10;

// How many multiprocessors the kernel uses for loads and for stores: just enough to fill the link. More
// multiprocessors bring no gain and slow down the engine's step: a store on two multiprocessors made a step
// 2.8 times as long, a store on eight 4.6 times.
inline constexpr std::array<int, 2> kKernelMultiprocessors = {2, 1};

// Unit: portions. The maximum number of portions for the copy engine that a stream has in flight, for loads
// and for stores. While one portion moves, the others are queued, so the copy engine need not wait for the
// thread. An op that the inference engine's stream waits for is enqueued without regard to this limit.
inline constexpr std::array<size_t, 2> kPortionsInFlight = {2, 3};
// Unit: launches. The maximum number of copy kernels that a stream has in flight. An op that the inference
// engine's stream waits for must itself wait until these kernels have ended.
inline constexpr size_t kLaunchesInFlight = 2;
// Unit: bytes. The largest portion for the copy engine, for loads and for stores. Each step of the inference
// engine ends with a small copy to the host, which waits for one portion of a store: 0.05 ms, or 0.1 ms if
// portions were twice as large.
inline constexpr std::array<int64_t, 2> kPortionBytes = {4 << 20, 2 << 20};
// Unit: copies. The maximum number of copies in a portion, even if the copies are short.
inline constexpr size_t kPortionCopies = 256;
// Unit: bytes. Longer copies to the host are cut to this length, so that the copy engine can serve another
// stream between two of them: behind two copies of several MiB, small copies of the inference engine waited
// 10 to 370 ms. A smaller limit brings no gain, and a thread that shares its core could then enqueue only 33
// GB/s instead of 50.
inline constexpr int64_t kStoreCopyBytes = 64 << 10;

// Unit: bytes. The maximum that the first kernel of an op copies, and the maximum for each later kernel. The
// first kernel is small so that it starts soon; while it runs, the thread makes the tables of the next
// kernel. The later kernels are large so that there are few of them, because each has to wait for a
// multiprocessor while a large matrix product runs.
inline constexpr int64_t kFirstLaunchBytes = 4 << 20;
inline constexpr int64_t kLaunchBytes = 64 << 20;
// Unit: bytes. The maximum that one kernel copies of a layerwise load. The engine waits for the layers of
// such a load one by one. A kernel that copies several layers keeps its multiprocessors from layer to layer.
// With one kernel per layer, each kernel would have to wait for a multiprocessor. Loads that take turns share
// this limit, so that their first layers arrive within 3 ms of each other.
inline constexpr int64_t kLayersLaunchBytes = 128 << 20;
// Unit: pages. The maximum number of pages per launch, because a launch's tables hold no more.
inline constexpr size_t kLaunchPages = 8192;
// Unit: bytes. Layers of a layerwise op that are smaller than this are copied together: enqueuing a copy
// takes about 10 us, in which the link moves this much.
inline constexpr int64_t kLeastRangeBytes = 512 << 10;

// A view's segments, divided by who copies them: the kernel or the copy engine. Each list keeps their order.
// A view may have runs of both kinds: for example, the short rows of an index and the long rows of a cache.
struct SplitRuns {
  std::vector<Segment> by_kernel, by_engine;
};
SplitRuns split_runs(std::span<const Segment> segments, int64_t kernel_below);

// Unit: bytes. The kernel copies runs shorter than this. 0 if the kernel copies no runs.
int64_t kernel_below(const Capabilities& capabilities, Direction direction);

// A description, such as "kernel for runs below 64 KiB, 2 multiprocessors; others in batches".
std::string describe_ways(const Capabilities& capabilities, Direction direction);

}  // namespace flexkv::cuda
