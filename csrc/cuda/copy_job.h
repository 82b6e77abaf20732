// The copy kernel's work, as plain tables. g++ and nvcc compile the same functions, so tests can run a job on
// the CPU, thread by thread.
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

// Number of loads that a thread has in flight. A warp thus loads 4 KiB of a run at once, and two
// multiprocessors are enough to fill the link.
inline constexpr int kCopyLoadsInFlight = 8;
// Unit: bytes. The maximum that one warp copies before it takes the next item: two rounds of
// kCopyLoadsInFlight loads of 16 bytes per thread. It is a multiple of 16, so that the chunks of a run keep
// the run's alignment.
inline constexpr int64_t kChunkBytes = 8192;

// A piece of a run. In block b of the pool it is at address device_base + b * block_stride, and in the stripe
// at page_offset. All sizes and offsets are in bytes.
struct CopyChunk {
  uintptr_t device_base;
  int64_t block_stride;
  int64_t page_offset;
  int64_t bytes;
};

// A page to copy: the number of the engine's block, and the address of the stripe in registered host memory.
struct CopyPage {
  int64_t block;
  uintptr_t host;
};

// How many stages one kernel can count.
inline constexpr int32_t kMostStages = 256;

// Words in device memory that let streams wait for one stage of a job that is still running. If the pointers
// are null, the job counts no stages.
struct StageWords {
  uint32_t* warps = nullptr;   // per stage: how many warps have passed it; 0 before and after a job
  uint32_t* passed = nullptr;  // grows by one for each stage whose bytes have all arrived; wraps around
};

// The copies of one launch of the copy kernel. An item is one chunk of one page. A job has fewer than 2^30
// items, because its tables hold no more.
struct CopyJob {
  const CopyChunk* chunks = nullptr;
  const CopyPage* pages = nullptr;
  int32_t chunk_count = 0;
  int32_t page_count = 0;
  bool to_device = false;
  // A word in device memory, where the kernel can read it often at little cost. When the word equals
  // `number`, warps begin no further item. If the pointer is null, the job cannot be ended early.
  const uint32_t* stop = nullptr;
  uint32_t number = 0;
  // stage_ends[i] is the number of chunks in stages 0 to i. The kernel copies stages (for example, one per
  // layer) one after another. If the pointer is null, all chunks are one stage.
  const int32_t* stage_ends = nullptr;
  int32_t stage_count = 1;
  StageWords words = {};
};

FLEXKV_HD inline int64_t item_count(const CopyJob& job) {
  return static_cast<int64_t>(job.chunk_count) * job.page_count;
}

// Copies one item of a stage. The stage has `count` chunks, of which the first is chunk `first` of the job.
// All `lanes` threads of a warp call this together. It costs one division per item and none per element.
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

// Copies the items of warp `warp`, one of `warps` warps, stage by stage. After the warp's items of a stage,
// calls `pass(stage)`, even if the warp has no item in that stage.
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
    item -= items;  // the next stage begins with the warp after the one that had the last item
    first = end;
    pass(stage);
  }
}

// Returns the same job with pointers to tables that lie one after the other at `tables`: the chunks, the
// pages, and then, if the job has several stages, the stage ends.
FLEXKV_HD inline CopyJob with_tables(const CopyJob& job, const void* tables) {
  CopyJob placed = job;
  placed.chunks = static_cast<const CopyChunk*>(tables);
  placed.pages = reinterpret_cast<const CopyPage*>(placed.chunks + job.chunk_count);
  if (job.stage_count > 1)
    placed.stage_ends = reinterpret_cast<const int32_t*>(placed.pages + job.page_count);
  return placed;
}

// Cuts segments into chunks of at most kChunkBytes, in order.
std::vector<CopyChunk> cut_to_chunks(const Segment* segments, size_t count);

// Unit: bytes. Tables up to this size are passed as a parameter of the launch, so that the launch need not
// wait until a copy of the tables has reached the device. Kernels of every toolkit accept a parameter of this
// size in addition to the job.
inline constexpr size_t kTablesInLaunch = 3840;

// Functions that start kernels on a stream. Each returns an empty string on success, otherwise the
// reason.
struct CopyKernels {
  // Loads all kernels into the current context. Without this, the first launch of each kernel would load it.
  // Loading may wait for the device's work, so it must not happen while a kernel runs that itself waits (see
  // `wait`).
  std::string (*load)() = nullptr;
  // Launches the copy kernel. `multiprocessors` limits how many multiprocessors the job takes from the
  // engine's kernels. If `tables` is empty, the job points to its tables, and the device must be able to read
  // them until the job has ended. Otherwise `tables` has at most kTablesInLaunch bytes in the caller's
  // memory, which are read before this returns.
  std::string (*copy)(const CopyJob& job, std::span<const std::byte> tables, int multiprocessors,
                      void* stream) = nullptr;
  // Work that is enqueued on the stream after this call starts only when `*passed` has reached `value`.
  // `passed` is StageWords::passed, and may wrap around.
  std::string (*wait)(const uint32_t* passed, uint32_t value, void* stream) = nullptr;
};

// The kernels of this build. All pointers are null if it was built without a CUDA toolkit.
CopyKernels copy_kernels();

}  // namespace flexkv::cuda
