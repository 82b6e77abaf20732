// Computes how many thread blocks a kernel is launched with.
#pragma once
#include <algorithm>
#include <cstdint>

namespace flexkv {

inline constexpr int kWarpThreads = 32;

// Unit: threads. The block size of kernels that leave most of the GPU's multiprocessors to the model. It is
// the largest block size that CUDA allows. The GPU places thread blocks on idle multiprocessors first. So two
// blocks of 512 threads would occupy two multiprocessors, but one block of 1,024 threads occupies only one.
// If a kernel needs more than 32 registers per thread, the 65,536 registers of a multiprocessor are enough
// for only one block of this size.
inline constexpr int kFullBlockThreads = 1024;

// Returns how many thread blocks of `block_threads` threads to launch for `items` items: enough for one warp
// per item, but at most `most_blocks`. If there are fewer warps than items, each warp processes several
// items. Returns 0 if there are no items.
constexpr int blocks_for(int64_t items, int block_threads, int most_blocks) {
  const int64_t warps = block_threads / kWarpThreads;
  return static_cast<int>(std::min<int64_t>(most_blocks, items / warps + (items % warps != 0 ? 1 : 0)));
}

}  // namespace flexkv
