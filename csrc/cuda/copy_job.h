// The copy kernel's work, as plain tables: g++ and nvcc compile the same functor, and run_on_cpu() runs it
// thread by thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/host_device.h"
#include "base/kernel_grid.h"
#include "layout/lane_work.h"
#include "layout/segment.h"

namespace flexkv::cuda {

// Unit: bytes. What one warp copies before it turns to the next: four rounds of 16 bytes a thread with four
// loads in flight. A multiple of 16, so that cutting a run keeps its alignment.
inline constexpr int64_t kChunkBytes = 8192;

// A part of a run, for every block.
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
  const CopyChunk* chunks;
  const CopyPage* pages;
  int32_t chunk_count;
  int32_t page_count;
  bool to_device;
};

FLEXKV_HD inline int64_t item_count(const CopyJob& job) {
  return static_cast<int64_t>(job.chunk_count) * job.page_count;
}

// One chunk of one page: what a warp does at a time. One division for each, none for each element.
FLEXKV_HD inline void copy_item(const CopyJob& job, int64_t item, int lane, int lanes) {
  const int64_t page = item / job.chunk_count;
  const CopyChunk& chunk = job.chunks[item - page * job.chunk_count];
  auto* device = reinterpret_cast<unsigned char*>(
      chunk.device_base + static_cast<uintptr_t>(job.pages[page].block * chunk.block_stride));
  auto* host =
      reinterpret_cast<unsigned char*>(job.pages[page].host + static_cast<uintptr_t>(chunk.page_offset));
  if (job.to_device) {
    copy_lane(device, host, chunk.bytes, lane, lanes);
  } else {
    copy_lane(host, device, chunk.bytes, lane, lanes);
  }
}

// The items of warp `warp` of `warps`.
FLEXKV_HD inline void copy_share(const CopyJob& job, int64_t warp, int64_t warps, int lane) {
  const int64_t items = item_count(job);
  for (int64_t item = warp; item < items; item += warps) copy_item(job, item, lane, kWarpThreads);
}

// Segments cut to chunks, in order.
std::vector<CopyChunk> cut_to_chunks(const Segment* segments, size_t count);

// The kernel on the CPU, thread after thread from last to first.
void run_on_cpu(const CopyJob& job, int64_t warps);

// Starts `job` on `stream`, with tables in memory that the device can read until the stream has passed it.
// Empty, or why not. `multiprocessors` bounds what it takes from the engine's kernels.
using KernelLauncher = std::string (*)(const CopyJob& job, int multiprocessors, void* stream);

// The launcher of this build; null without a CUDA toolkit.
KernelLauncher copy_kernel_launcher();

}  // namespace flexkv::cuda
