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

// Loads that a thread has in flight: a warp loads 4 KiB of a run at once, so that two multiprocessors fill
// the link.
inline constexpr int kCopyLoadsInFlight = 8;
// Unit: bytes. The bytes that one warp copies before it takes the next item: two rounds of kCopyLoadsInFlight
// loads of 16 bytes per thread. A multiple of 16, so that cutting a run keeps its alignment.
inline constexpr int64_t kChunkBytes = 8192;

// A part of a run, at one offset in every block.
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

// How many stages a kernel can count.
inline constexpr int32_t kMostStages = 256;

// Words in device memory with which streams wait for a stage of a job that is still running. Null: nothing is
// counted.
struct StageWords {
  uint32_t* warps = nullptr;   // for each stage: how many warps have passed it; 0 before and after a job
  uint32_t* passed = nullptr;  // grows by one for each stage whose bytes have all arrived
};

// A job has fewer than 2^30 pieces of work, each one chunk of one page, because its tables have no more room.
struct CopyJob {
  const CopyChunk* chunks = nullptr;
  const CopyPage* pages = nullptr;
  int32_t chunk_count = 0;
  int32_t page_count = 0;
  bool to_device = false;
  // A word in device memory, which is fast to read repeatedly: once it is `number`, warps begin no further
  // item. Null: nothing ends the job early.
  const uint32_t* stop = nullptr;
  uint32_t number = 0;
  // Parts of the job that are copied one after the other, for example one layer each: for each stage, the
  // number of chunks up to its end. Null: all chunks are one stage.
  const int32_t* stage_ends = nullptr;
  int32_t stage_count = 1;
  StageWords words = {};
};

FLEXKV_HD inline int64_t item_count(const CopyJob& job) {
  return static_cast<int64_t>(job.chunk_count) * job.page_count;
}

// Copies one of `count` chunks, from `first` on, of one page, which is what a warp does at a time. It takes
// one division per item, none per element.
FLEXKV_HD inline void copy_item(const CopyJob& job, int32_t first, int32_t count, int32_t item, int lane,
                                int lanes) {
  const int32_t page = item / count;
  const CopyChunk& chunk = job.chunks[first + (item - page * count)];
  auto* device = reinterpret_cast<unsigned char*>(
      block_address(chunk.device_base, chunk.block_stride, job.pages[page].block));
  auto* host =
      reinterpret_cast<unsigned char*>(job.pages[page].host + static_cast<uintptr_t>(chunk.page_offset));
  if (job.to_device) {
    copy_lane<kCopyLoadsInFlight>(device, host, chunk.bytes, lane, lanes);
  } else {
    copy_lane<kCopyLoadsInFlight>(host, device, chunk.bytes, lane, lanes);
  }
}

// Reads a word that another thread may write at the same time.
FLEXKV_HD inline uint32_t read_word(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile uint32_t*>(word);
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

FLEXKV_HD inline bool is_stopped(const CopyJob& job) {
  return job.stop != nullptr && read_word(job.stop) == job.number;
}

// Copies the items of warp `warp` of `warps`, stage after stage. `pass(stage)` is called behind the warp's
// items of each stage, also if it has none.
template <typename Pass>
FLEXKV_HD inline void copy_share(const CopyJob& job, int32_t warp, int32_t warps, int lane,
                                 const Pass& pass) {
  int32_t item = warp;
  int32_t first = 0;
  for (int32_t stage = 0; stage < job.stage_count; ++stage) {
    const int32_t end = job.stage_ends == nullptr ? job.chunk_count : job.stage_ends[stage];
    const int32_t items = (end - first) * job.page_count;
    for (; item < items; item += warps) {
      if (is_stopped(job)) return;
      copy_item(job, first, end - first, item, lane, kWarpThreads);
    }
    item -= items;  // the next stage begins with the warp behind the one that had the last item
    first = end;
    pass(stage);
  }
}

// The same job with its tables in one piece of memory: the chunks, the pages, then, if it has several stages,
// their ends.
FLEXKV_HD inline CopyJob with_tables(const CopyJob& job, const void* tables) {
  CopyJob placed = job;
  placed.chunks = static_cast<const CopyChunk*>(tables);
  placed.pages = reinterpret_cast<const CopyPage*>(placed.chunks + job.chunk_count);
  if (job.stage_count > 1)
    placed.stage_ends = reinterpret_cast<const int32_t*>(placed.pages + job.page_count);
  return placed;
}

// Segments cut to chunks, in order.
std::vector<CopyChunk> cut_to_chunks(const Segment* segments, size_t count);

// Unit: bytes. Tables up to this size are passed with the launch, which then need not wait for a copy of
// them: kernels of any toolkit accept this much as parameters, beside the job.
inline constexpr size_t kTablesInLaunch = 3840;

// Functions that start kernels on a stream. Each returns an empty string, or why it failed.
struct CopyKernels {
  // Loads all kernels into the current context. Otherwise the first launch of each would load it, which may
  // wait for the device's work, and so must not happen beside a kernel that itself waits.
  std::string (*load)() = nullptr;
  // `multiprocessors` bounds how many multiprocessors the job takes from the engine's kernels. Its tables lie
  // in memory that the device can read until the stream has passed the job; or they are `tables`, at most
  // kTablesInLaunch bytes of the caller's memory, which are read before this returns.
  std::string (*copy)(const CopyJob& job, std::span<const std::byte> tables, int multiprocessors,
                      void* stream) = nullptr;
  // Work enqueued on the stream after this starts when StageWords::passed, whose number wraps around, has
  // reached `value`.
  std::string (*wait)(const uint32_t* passed, uint32_t value, void* stream) = nullptr;
};

// The kernels of this build; null without a CUDA toolkit.
CopyKernels copy_kernels();

}  // namespace flexkv::cuda
