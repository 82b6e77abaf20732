// Which way runs go, and how much of them at a time. The constants come from measurements on an H200 (PCIe 5
// x16, driver 580). docs/gpu.md has the figures.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_plan.h"

namespace flexkv::cuda {

// Unit: bytes. The kernel copies runs shorter than this, for loads and for stores. The copy engine, which
// costs the engine's kernels nothing, copies all runs for which a thread can make its batches fast enough.
inline constexpr std::array<int64_t, 2> kKernelBelowBytes = {64 << 10, 32 << 10};
// The same where calls come one by one: a call costs about 2 us whatever its length, in which PCIe 5 moves
// 100 KiB. Source: published block-copy rates on an H100, where runs of 64 KiB reach 14.5 GB/s by single
// calls and 42 by kernel, and runs of 512 KiB 39.5 and 47.
inline constexpr int64_t kKernelBelowBytesWithoutBatch = 512 << 10;

// Unit: multiprocessors. What fills the link, for loads and for stores. More of them gain nothing and slow
// the engine's step: a store on two made it 2.8 times as long, on eight 4.6 times.
inline constexpr std::array<int, 2> kKernelMultiprocessors = {2, 1};

// Unit: portions. How many a stream has under way if items take turns: while one moves, the next is in the
// queue. Portions of an op that the engine's stream is ordered behind come on top.
inline constexpr size_t kPortionsUnderWay = 2;
// Unit: bytes, copies. What the copy engine is given at once: a small copy of the engine's waits for two
// portions, 0.15 ms, and between the calls the thread sees what has ended.
inline constexpr int64_t kPortionBytes = 4 << 20;
inline constexpr size_t kPortionCopies = 256;
// Unit: bytes. Longer copies to the host are cut: the copy engine turns to another stream between two copies
// of a batch, and behind two longer ones small copies of the engine's waited 10 to 370 ms.
inline constexpr int64_t kStoreCopyBytes = 32 << 10;
// Unit: bytes. Runs to the host from this length on are not cut that short, as a thread can hardly make so
// many calls: their copies go one by one, each when the one before has ended.
inline constexpr int64_t kAloneBytes = 1 << 20;

// Unit: bytes. What one kernel takes, the first of an op and the others. The first is small so that it starts
// soon, and the next tables are made while it runs; the others are large so that they are few, as each waits
// for a multiprocessor beside a large matrix product.
inline constexpr int64_t kFirstLaunchBytes = 4 << 20;
inline constexpr int64_t kLaunchBytes = 64 << 20;
// Unit: pages. The same in pages: what tables have room for.
inline constexpr size_t kLaunchPages = 8192;
// Unit: bytes. Smaller layers of a layerwise op go together: to enqueue one costs some 10 us, in which the
// link moves this much.
inline constexpr int64_t kLeastRangeBytes = 512 << 10;

// The segments that go each way, in order. A view may have both: short rows of an index beside long ones of a
// cache.
struct SplitRuns {
  std::vector<Segment> by_kernel, by_engine;
};
SplitRuns split_runs(std::span<const Segment> segments, int64_t kernel_below);

// Unit: bytes. The kernel copies shorter runs; 0: it copies none.
int64_t kernel_below(const Capabilities& capabilities, Direction direction);

// How the copy engine is given runs. A copy has at most `longest` bytes; `alone`: each is a portion, and
// nothing else is under way beside it.
struct EngineWay {
  int64_t longest = kPortionBytes;
  bool alone = false;
};
EngineWay engine_way(const Capabilities& capabilities, Direction direction, std::span<const Segment> runs);

// "kernel for runs below 64 KiB, 2 multiprocessors; others in batches", in words.
std::string describe_ways(const Capabilities& capabilities, Direction direction);

}  // namespace flexkv::cuda
