// The kernel of the rotation, which rotate_kernel.cu launches.
#pragma once
#include "base/kernel_grid.h"
#include "rope/rotation.h"

namespace flexkv {
namespace {

// The number of threads in a thread block, and the number of thread blocks per multiprocessor. Small thread
// blocks fit onto multiprocessors that also run other kernels. The rotation may occupy the whole GPU, because
// the model's own work waits for the rotation.
constexpr int kRotateThreads = 256;
constexpr int kRotateBlocksPerMultiprocessor = 4;

template <typename Element, Pairing kPairing>
__global__ void __launch_bounds__(kRotateThreads, kRotateBlocksPerMultiprocessor)
    rotate_kernel(const RotationRows rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t block_warps = blockDim.x / kWarpThreads;
  const int64_t step = gridDim.x * block_warps;
  int64_t row = blockIdx.x * block_warps + threadIdx.x / kWarpThreads;
  for (; row < rows.rows; row += step) rotate_row_lane<Element, kPairing>(rows, row, lane, kWarpThreads);
}

}  // namespace
}  // namespace flexkv
