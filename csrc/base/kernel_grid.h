// Computes how many thread blocks a kernel is launched with.
#pragma once
#include <algorithm>
#include <cstdint>

namespace flexkv {

inline constexpr int kWarpThreads = 32;

// Unit: threads. The block size of a kernel that leaves most multiprocessors to the model: the maximum.
// Blocks go to idle multiprocessors first, so two blocks of 512 take two where one of 1,024 takes one. A
// multiprocessor's 65,536 registers hold one such block only if it takes more than 32 registers per thread.
inline constexpr int kFullBlockThreads = 1024;

// How many blocks of `block_threads` threads to launch for `items` items: one warp per item, but at most
// `most_blocks` blocks, whose warps then take several items each. 0 if there are no items.
constexpr int blocks_for(int64_t items, int block_threads, int most_blocks) {
  const int64_t warps = block_threads / kWarpThreads;
  return static_cast<int>(std::min<int64_t>(most_blocks, items / warps + (items % warps != 0 ? 1 : 0)));
}

}  // namespace flexkv
