#include "transfer/host_copy.h"

#include <cstring>

namespace flexkv {

void copy_run(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }

void gather(const KvView& view, int64_t block, std::byte* dst_stripe) {
  gather_layers(view, view.segments(), block, dst_stripe);
}

void scatter(const KvView& view, int64_t block, const std::byte* src_stripe) {
  scatter_layers(view, view.segments(), block, src_stripe);
}

void gather_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                   std::byte* dst_stripe) {
  view.require_block(block);
  for (const Segment& s : segments) {
    copy_run(dst_stripe + s.page_offset, reinterpret_cast<const void*>(run_address(s, block)),
             static_cast<size_t>(s.run_bytes));
  }
}

void scatter_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                    const std::byte* src_stripe) {
  view.require_block(block);
  for (const Segment& s : segments) {
    copy_run(reinterpret_cast<void*>(run_address(s, block)), src_stripe + s.page_offset,
             static_cast<size_t>(s.run_bytes));
  }
}

}  // namespace flexkv
