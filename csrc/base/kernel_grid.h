// How many thread blocks a kernel is launched with. Arithmetic only.
#pragma once
#include <algorithm>
#include <cstdint>

namespace flexkv {

inline constexpr int kWarpThreads = 32;

// Unit: threads. The block size of a kernel that leaves most multiprocessors to the model: as large as can
// be. Blocks go to idle multiprocessors first, so two blocks of 512 take two where one of 1,024 takes one. A
// multiprocessor's 65,536 registers hold one such block only if it takes more than 32 registers per thread.
inline constexpr int kFullBlockThreads = 1024;

// Blocks of `block_threads` for `items` that warps take in turns: one warp per item, at most `most_blocks`
// blocks. 0 without items: nothing to launch.
constexpr int blocks_for(int64_t items, int block_threads, int most_blocks) {
  const int64_t warps = block_threads / kWarpThreads;
  return static_cast<int>(std::min<int64_t>(most_blocks, items / warps + (items % warps != 0 ? 1 : 0)));
}

}  // namespace flexkv
