// The copy kernel's work (a job), described by plain tables. g++ and nvcc compile the same functions, so
// tests can run a job on the CPU, one GPU thread after another.
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

// Number of loads that a thread has in flight. So a warp loads 4 KiB of a run at once, and two
// multiprocessors are enough to use all of the link's bandwidth.
inline constexpr int kCopyLoadsInFlight = 8;
// Unit: bytes. The maximum size of an item, which one warp copies: two rounds of kCopyLoadsInFlight loads of
// 16 bytes per thread. It is a multiple of 16, so that the chunks of a run keep the run's alignment.
inline constexpr int64_t kChunkBytes = 8192;

// A piece of a run. In block b of the pool, it begins at address device_base + b * block_stride; in the
// stripe, it begins at page_offset. All sizes and offsets are in bytes.
struct CopyChunk {
  uintptr_t device_base;
  int64_t block_stride;
  int64_t page_offset;
  int64_t bytes;
};

// A page to copy: the number of the inference engine's block, and the address of the stripe in registered
// host memory.
struct CopyPage {
  int64_t block;
  uintptr_t host;
};

// The maximum number of stages that one kernel can count.
inline constexpr int32_t kMostStages = 256;

// Words in device memory that let streams wait for one stage of a job that is still running. If the pointers
// are null, the job counts no stages.
struct StageWords {
  // Per stage: number of warps that have passed the stage; 0 before and after a job.
  uint32_t* warps = nullptr;
  // Incremented for each stage that has been copied completely. Wraps around.
  uint32_t* passed = nullptr;
};

// The copies of one launch of the copy kernel. An item is one chunk of one page. A job has fewer than 2^30
// items, because the sizes of its tables are limited.
struct CopyJob {
  const CopyChunk* chunks = nullptr;
  const CopyPage* pages = nullptr;
  int32_t chunk_count = 0;
  int32_t page_count = 0;
  bool to_device = false;
  // Points to a word in device memory, where the kernel can read it often at little cost. When the word is
  // equal to `number`, no warp begins a further item. If the pointer is null, the job cannot be ended early.
  const uint32_t* stop = nullptr;
  uint32_t number = 0;
  // stage_ends[i] is the number of chunks in the stages 0 to i. A stage is, for example, a layer. The kernel
  // copies one stage after another. If the pointer is null, all chunks are one stage.
  const int32_t* stage_ends = nullptr;
  int32_t stage_count = 1;
  StageWords words = {};
};

FLEXKV_HD inline int64_t item_count(const CopyJob& job) {
  return static_cast<int64_t>(job.chunk_count) * job.page_count;
}

// Copies one item of a stage. The stage has `count` chunks; its first chunk is chunk `first` of the job. All
// `lanes` threads of a warp call this function together. The function divides once per item, and not for each
// element.
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

// Copies the items of warp number `warp` (of `warps` warps), stage by stage. After the warp's items of a
// stage, calls `pass(stage)`, even if the warp has no item in that stage.
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
    // In the next stage, the first item belongs to the warp after the one with this stage's last item.
    item -= items;
    first = end;
    pass(stage);
  }
}

// Returns `job` with pointers to tables that lie one after another at `tables`: the chunks, the pages, and
// then, if the job has several stages, the stage ends.
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

// Unit: bytes. Tables up to this size are passed as a parameter of the launch. So the launch does not have to
// wait until the tables have been copied to the device. Kernels of every toolkit accept a parameter of this
// size in addition to the job.
inline constexpr size_t kTablesInLaunch = 3840;

// Functions that start kernels on a stream. Each returns an empty string on success, otherwise an error
// message.
struct CopyKernels {
  // Loads all kernels into the current context. Without this call, the first launch of each kernel would load
  // the kernel. Loading may wait for the device's work, so it must not happen while a kernel runs that is
  // itself waiting (see `wait`).
  std::string (*load)() = nullptr;
  // Launches the copy kernel. `multiprocessors` limits how many multiprocessors the job takes away from the
  // inference engine's kernels. If `tables` is empty, the job points to its tables, and the device must be
  // able to read them until the job has ended. Otherwise `tables` has at most kTablesInLaunch bytes in the
  // caller's memory, which are read before the function returns.
  std::string (*copy)(const CopyJob& job, std::span<const std::byte> tables, int multiprocessors,
                      void* stream) = nullptr;
  // Enqueues a kernel that waits: work that is enqueued on the stream after this call starts only when
  // `*passed` has reached `value`. `passed` is StageWords::passed, and may wrap around.
  std::string (*wait)(const uint32_t* passed, uint32_t value, void* stream) = nullptr;
};

// The kernels of this build. All pointers are null in a build without a CUDA toolkit.
CopyKernels copy_kernels();

}  // namespace flexkv::cuda
