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

}  // namespace flexkv::cuda
