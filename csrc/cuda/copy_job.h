// The copy kernel's work, as plain tables: g++ and nvcc compile the same functor, and run_on_cpu() runs it
// thread by thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/host_device.h"
#include "base/kernel_grid.h"
#include "layout/lane_work.h"
#include "layout/segment.h"

namespace flexkv::cuda {

// Loads of a thread in flight: a warp has a run of 4 KiB on its way at once, so that two multiprocessors fill
// the link.
inline constexpr int kCopyLoadsInFlight = 8;
// Unit: bytes. What one warp copies before it turns to the next item: two rounds of kCopyLoadsInFlight loads
// of 16 bytes per thread. A multiple of 16, so that cutting a run keeps its alignment.
inline constexpr int64_t kChunkBytes = 8192;

// A part of a run, the same in every block.
struct CopyChunk {
  uintptr_t device_base;
  int64_t block_stride;
  int64_t page_offset;
  int64_t bytes;
};

// A page: the engine's block, and where its stripe lies in registered host memory.
struct CopyPage {
  int64_t block;
  uintptr_t host;
};

struct CopyJob {
  const CopyChunk* chunks = nullptr;
  const CopyPage* pages = nullptr;
  int32_t chunk_count = 0;
  int32_t page_count = 0;
  bool to_device = false;
  // A word in device memory, which is quick to read again and again: once it is `number`, warps begin no
  // further item. Null: nothing ends the job early.
  const uint32_t* stop = nullptr;
  uint32_t number = 0;
};

FLEXKV_HD inline int64_t item_count(const CopyJob& job) {
  return static_cast<int64_t>(job.chunk_count) * job.page_count;
}

// Copies one chunk of one page, which is what a warp does at a time. It takes one division per item, none per
// element.
FLEXKV_HD inline void copy_item(const CopyJob& job, int64_t item, int lane, int lanes) {
  const int64_t page = item / job.chunk_count;
  const CopyChunk& chunk = job.chunks[item - page * job.chunk_count];
  auto* device = reinterpret_cast<unsigned char*>(
      chunk.device_base + static_cast<uintptr_t>(job.pages[page].block * chunk.block_stride));
  auto* host =
      reinterpret_cast<unsigned char*>(job.pages[page].host + static_cast<uintptr_t>(chunk.page_offset));
  if (job.to_device) {
    copy_lane<kCopyLoadsInFlight>(device, host, chunk.bytes, lane, lanes);
  } else {
    copy_lane<kCopyLoadsInFlight>(host, device, chunk.bytes, lane, lanes);
  }
}

FLEXKV_HD inline bool is_stopped(const CopyJob& job) {
  if (job.stop == nullptr) return false;
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile uint32_t*>(job.stop) == job.number;
#else
  return __atomic_load_n(job.stop, __ATOMIC_RELAXED) == job.number;
#endif
}

// Copies the items of warp `warp` of `warps`.
FLEXKV_HD inline void copy_share(const CopyJob& job, int64_t warp, int64_t warps, int lane) {
  const int64_t items = item_count(job);
  for (int64_t item = warp; item < items && !is_stopped(job); item += warps) {
    copy_item(job, item, lane, kWarpThreads);
  }
}

// The same job with its tables in one piece of memory: the chunks, then the pages.
FLEXKV_HD inline CopyJob with_tables(const CopyJob& job, const void* tables) {
  CopyJob placed = job;
  placed.chunks = static_cast<const CopyChunk*>(tables);
  placed.pages = reinterpret_cast<const CopyPage*>(placed.chunks + job.chunk_count);
  return placed;
}

// Segments cut to chunks, in order.
std::vector<CopyChunk> cut_to_chunks(const Segment* segments, size_t count);

// Runs the kernel on the CPU, thread after thread from last to first.
void run_on_cpu(const CopyJob& job, int64_t warps);

// Unit: bytes. Tables up to this size travel with the launch, which then waits for no copy of them: kernels
// of any toolkit take this much as parameters, beside the job.
inline constexpr size_t kTablesInLaunch = 3840;

// Starts `job` on `stream`; `multiprocessors` bounds what it takes from the engine's kernels. The job's
// tables lie in memory that the device can read until the stream has passed the job; or they are `tables`, at
// most kTablesInLaunch bytes of the caller's memory, which are read before this returns. Empty, or why it
// failed.
using KernelLauncher = std::string (*)(const CopyJob& job, std::span<const std::byte> tables,
                                       int multiprocessors, void* stream);

// The launcher of this build; null without a CUDA toolkit.
KernelLauncher copy_kernel_launcher();

}  // namespace flexkv::cuda
