// How the runs of some pages are copied between a device and host memory. Arithmetic only: no driver.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/segment.h"

namespace flexkv::cuda {

enum class Direction { kToDevice, kToHost };

enum class Path {
  kKernel,   // a kernel on few multiprocessors reads or writes host memory
  kBatch,    // cuMemcpyBatchAsync
  kPitched,  // cuMemcpy2DAsync for rows of equal distance, single calls for the rest
  kSingle,   // one call a run
};
inline constexpr int kPaths = 4;
const char* to_string(Path path);

// Unit: bytes. Where nothing is measured and calls are single, runs up to this length go by kernel: one
// copy-engine call costs about 2 us whatever its length, which is the time PCIe 5 takes for 100 KiB. Source:
// published block-copy rates on an H100 (PCIe 5), where 64 KiB runs reach 14.5 GB/s by single calls and 42 by
// kernel, and 512 KiB runs 39.5 and 47. Not measured on our own hardware.
inline constexpr int64_t kKernelUpToBytes = 256 << 10;
// The same where calls come in batches, which pay the call once: the kernel takes multiprocessors from the
// engine (6 % of its throughput in the same source), so the copy engine is preferred early. 32 KiB itself, a
// common length, is the kernel's: vLLM's block swapper found its kernel ahead there, and switches at 28 KiB
// for the multiprocessors' sake. Not measured on our own hardware.
inline constexpr int64_t kKernelUpToBytesWithBatch = 32 << 10;
// Unit: descriptors. Batches of 51,828 crashed a driver (vllm-project/vllm#49276).
inline constexpr size_t kMostBatchCopies = 4096;
// Unit: multiprocessors. What the kernel may take. vLLM's block swapper uses 12 on the same kind of GPU; the
// link is full with fewer when each thread keeps several loads in flight.
inline constexpr int kKernelMultiprocessors = 8;

// What can be used here.
struct Capabilities {
  bool kernel = false;
  bool batch = false;
  size_t max_pitch_bytes = 0;  // 0: no pitched copies
};

// Unit: bytes. Of the portions of `bytes`, so that each is at most `most` (or 64 KiB, of which it is a
// multiple) and none much shorter: one that is would have ended before the next is there.
int64_t portion_bytes(int64_t bytes, int64_t most);

// The same runs in consecutive portions of at most `max_bytes` of one page; a run that is longer is cut.
std::vector<std::vector<Segment>> cut_to_portions(std::span<const Segment> segments, int64_t max_bytes);

// One contiguous copy, in either direction.
struct Copy {
  uintptr_t device = 0;
  std::byte* host = nullptr;
  size_t bytes = 0;
  int64_t piece = 0;     // of host memory; see PinPieces
  uintptr_t region = 0;  // of device memory: another number may be another allocation
};

// A page to copy: a block of the engine's pool and its stripe.
struct PageEnds {
  int64_t block = 0;
  std::byte* stripe = nullptr;
  int64_t piece = 0;  // that the stripe's slot was registered with
};

// All runs of `pages`, page by page; neighbours in one piece and region that continue each other at both ends
// are one copy, empty runs none. Segments that lie within each other's blocks are of one region, as of pools
// with all layers in a block; others may be layers that were allocated one by one.
std::vector<Copy> list_copies(std::span<const Segment> segments, std::span<const PageEnds> pages);

// `rows` copies of equal length, each `device_step` and `host_step` bytes after the one before.
struct PitchedCopy {
  Copy first;
  size_t rows = 1;
  size_t device_step = 0;
  size_t host_step = 0;
};

// The same bytes in as few pitched copies as two orders give: along the pages' runs, or along each run's
// pages. Steps are at most `max_pitch_bytes` and at least a row; rows are of one piece and region, because
// a driver may refuse a range of several allocations even where these follow each other.
std::vector<PitchedCopy> group_rows(std::span<const Copy> copies, size_t max_pitch_bytes);

}  // namespace flexkv::cuda
