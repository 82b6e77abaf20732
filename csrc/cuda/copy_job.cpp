#include "cuda/copy_job.h"

#include <algorithm>

namespace flexkv::cuda {

std::vector<CopyChunk> cut_to_chunks(const Segment* segments, size_t count) {
  std::vector<CopyChunk> chunks;
  for (size_t i = 0; i < count; ++i) {
    const Segment& s = segments[i];
    for (int64_t at = 0; at < s.run_bytes; at += kChunkBytes) {
      chunks.push_back({s.base + static_cast<uintptr_t>(at), s.block_stride, s.page_offset + at,
                        std::min(kChunkBytes, s.run_bytes - at)});
    }
  }
  return chunks;
}

void run_on_cpu(const CopyJob& job, int32_t warps) {
  for (int32_t warp = warps - 1; warp >= 0; --warp) {
    for (int lane = kWarpThreads - 1; lane >= 0; --lane) {
      copy_share(job, warp, warps, lane, [&](int32_t) {
        const bool last = warp == 0 && lane == 0;
        if (last && job.words.passed != nullptr) __atomic_fetch_add(job.words.passed, 1, __ATOMIC_RELEASE);
      });
    }
  }
}

}  // namespace flexkv::cuda
