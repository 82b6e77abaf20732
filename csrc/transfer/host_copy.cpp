#include "transfer/host_copy.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace flexkv {
namespace {

// Unit: bytes. Below this a run is too short to repay aligning and fencing; memcpy is as fast.
constexpr size_t kStreamMinBytes = 512;
// Unit: bytes. Streaming stores fill whole cache lines only if they start on one.
constexpr size_t kLineBytes = 64;
// Unit: bytes. How far ahead of the copy to prefetch: covers DRAM latency at ~20 GB/s and the hardware
// prefetcher's blind start at every 4 KiB boundary and run. Measured with benchmarks/gather.py on a Zen 3
// core.
constexpr size_t kPrefetchBytes = 2048;

// Copies a run with streaming stores (no read-for-ownership of the destination, no eviction of what the
// caches hold) and prefetches the start of the run that will be copied next. Returns without a fence.
__attribute__((target("avx2"))) void stream_run(std::byte* dst, const std::byte* src, size_t bytes,
                                                const std::byte* next, size_t next_bytes) {
  const size_t head =
      std::min(bytes, (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes);
  if (bytes < kStreamMinBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  const size_t lines_end = head + (bytes - head) / kLineBytes * kLineBytes;
  // The run's own part of the prefetch ends kPrefetchBytes before its end; from there on it is the next run's
  // turn.
  const size_t own_end = bytes > kPrefetchBytes ? std::max(head, bytes - kPrefetchBytes) : head;
  const auto copy_line = [&](size_t at) __attribute__((target("avx2"), always_inline)) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  };
  size_t at = head;
  for (; at + kLineBytes <= own_end; at += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(src + at + kPrefetchBytes), _MM_HINT_NTA);
    copy_line(at);
  }
  size_t ahead = 0;
  for (; at < lines_end; at += kLineBytes, ahead += kLineBytes) {
    if (ahead < next_bytes) _mm_prefetch(reinterpret_cast<const char*>(next + ahead), _MM_HINT_NTA);
    copy_line(at);
  }
  std::memcpy(dst + lines_end, src + lines_end, bytes - lines_end);
}

bool can_stream() {
  static const bool found = __builtin_cpu_supports("avx2");
  return found;
}

enum class Direction { kGather, kScatter };

template <Direction direction, typename Byte>
void move(std::span<const Segment> segments, int64_t block, Byte* stripe) {
  const auto ends = [&](const Segment& s) {
    auto* run = reinterpret_cast<std::byte*>(run_address(s, block));
    Byte* part = stripe + s.page_offset;
    if constexpr (direction == Direction::kGather) {
      return std::pair<std::byte*, const std::byte*>{part, run};
    } else {
      return std::pair<std::byte*, const std::byte*>{run, part};
    }
  };
  if (!can_stream()) {
    for (const Segment& s : segments) {
      const auto [dst, src] = ends(s);
      std::memcpy(dst, src, static_cast<size_t>(s.run_bytes));
    }
    return;
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto [dst, src] = ends(segments[i]);
    const bool last = i + 1 == segments.size();
    const std::byte* next = last ? nullptr : ends(segments[i + 1]).second;
    const auto next_bytes = last ? 0 : static_cast<size_t>(segments[i + 1].run_bytes);
    stream_run(dst, src, static_cast<size_t>(segments[i].run_bytes), next, next_bytes);
  }
  _mm_sfence();
}

}  // namespace

void copy_run(void* dst, const void* src, size_t bytes) {
  if (!can_stream()) {
    std::memcpy(dst, src, bytes);
    return;
  }
  stream_run(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes, nullptr, 0);
  _mm_sfence();
}

void gather(const KvView& view, int64_t block, std::byte* dst_stripe) {
  gather_layers(view, view.segments(), block, dst_stripe);
}

void scatter(const KvView& view, int64_t block, const std::byte* src_stripe) {
  scatter_layers(view, view.segments(), block, src_stripe);
}

void gather_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                   std::byte* dst_stripe) {
  view.require_block(block);
  move<Direction::kGather>(segments, block, dst_stripe);
}

void scatter_layers(const KvView& view, std::span<const Segment> segments, int64_t block,
                    const std::byte* src_stripe) {
  view.require_block(block);
  move<Direction::kScatter>(segments, block, src_stripe);
}

}  // namespace flexkv
