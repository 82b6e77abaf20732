#include "transfer/host_copy.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace flexkv {
namespace {

// Unit: bytes. Shorter runs are copied with memcpy: streaming (non-temporal) stores are no faster for short
// runs, because aligning the destination and the fence take too long.
constexpr size_t kStreamMinBytes = 512;
// Unit: bytes. The size of a cache line. Streaming stores fill complete lines only if they start at the
// beginning of a line.
constexpr size_t kLineBytes = 64;
// Unit: bytes. stream_pair() copies two runs in alternation: this many bytes (eight vector registers) of one
// run, then as many of the other run.
constexpr size_t kStepBytes = 256;
// Unit: bytes. How far ahead of the copy to prefetch. Among the distances from 256 to 4,096, this was the
// best on a Zen 3 core with the buffers of benchmarks/gather.py. Prefetching helps at the start of runs and
// of 4 KiB memory pages, where the hardware prefetcher has not yet detected the access pattern.
constexpr size_t kPrefetchBytes = 512;

// The remainder of a run that is being copied. `next`: the source of the run that will be copied after it;
// may be null.
struct Stream {
  std::byte* dst;
  const std::byte* src;
  size_t bytes;
  const std::byte* next;
};

void advance(Stream& s, size_t bytes) {
  s.dst += bytes;
  s.src += bytes;
  s.bytes -= bytes;
}

// Copies bytes until the destination is at the start of a cache line.
void align(Stream& s) {
  const size_t past_line = reinterpret_cast<uintptr_t>(s.dst) % kLineBytes;
  const size_t head = std::min(s.bytes, (kLineBytes - past_line) % kLineBytes);
  std::memcpy(s.dst, s.src, head);
  advance(s, head);
}

// Copies kStepBytes with streaming (non-temporal) stores, which neither read the destination's cache lines
// nor evict other lines from the caches.
__attribute__((target("avx2"), always_inline)) inline void step(Stream& s) {
  constexpr size_t kRegisters = kStepBytes / sizeof(__m256i);
  // A prefetch past the end of the run is harmless, because prefetches never fault.
  const std::byte* ahead = s.src + kPrefetchBytes;
  if (s.bytes <= kPrefetchBytes && s.next) ahead = s.next + (kPrefetchBytes - s.bytes);
  for (size_t at = 0; at < kStepBytes; at += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T0);
  }
  __m256i held[kRegisters];
  for (size_t i = 0; i < kRegisters; ++i)
    held[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.src) + i);
  for (size_t i = 0; i < kRegisters; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(s.dst) + i, held[i]);
  advance(s, kStepBytes);
}

__attribute__((target("avx2"))) void finish(Stream& s) {
  while (s.bytes >= kStepBytes) step(s);
  std::memcpy(s.dst, s.src, s.bytes);
}

// Copies two runs in alternation, because reading from two sources hides more memory latency than reading
// from one: runs of 4 KiB are copied at 13 GB/s instead of 10. Copying four runs at once is slower than
// copying one, because their stores are then no longer combined into full lines. The caller must issue a
// store fence afterwards.
__attribute__((target("avx2"))) void stream_pair(Stream a, Stream b) {
  align(a);
  align(b);
  while (a.bytes >= kStepBytes && b.bytes >= kStepBytes) {
    step(a);
    step(b);
  }
  finish(a);
  finish(b);
}

// Copies a single run by splitting it into two runs for stream_pair().
void stream_alone(const Stream& s) {
  const size_t half = s.bytes / 2 / kLineBytes * kLineBytes;
  stream_pair({s.dst, s.src, half, nullptr}, {s.dst + half, s.src + half, s.bytes - half, s.next});
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
  const auto stream = [&](size_t i, size_t next) {
    const auto [dst, src] = ends(segments[i]);
    return Stream{dst, src, static_cast<size_t>(segments[i].run_bytes),
                  next < segments.size() ? ends(segments[next]).second : nullptr};
  };
  const auto is_long = [&](size_t i) {
    return segments[i].run_bytes >= static_cast<int64_t>(kStreamMinBytes);
  };
  for (size_t i = 0; i < segments.size();) {
    if (!is_long(i)) {
      const auto [dst, src] = ends(segments[i]);
      std::memcpy(dst, src, static_cast<size_t>(segments[i].run_bytes));
      i += 1;
    } else if (i + 1 < segments.size() && is_long(i + 1)) {
      stream_pair(stream(i, i + 2), stream(i + 1, i + 3));
      i += 2;
    } else {
      stream_alone(stream(i, i + 1));
      i += 1;
    }
  }
  _mm_sfence();
}

}  // namespace

void copy_run(void* dst, const void* src, size_t bytes) {
  if (!can_stream() || bytes < kStreamMinBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  stream_alone({static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes, nullptr});
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

void gather_segments(std::span<const Segment> segments, int64_t block, std::byte* dst) {
  move<Direction::kGather>(segments, block, dst);
}

void scatter_segments(std::span<const Segment> segments, int64_t block, const std::byte* src) {
  move<Direction::kScatter>(segments, block, src);
}

}  // namespace flexkv
