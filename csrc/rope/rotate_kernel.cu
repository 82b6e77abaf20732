#include <cuda_runtime.h>

#include <algorithm>

#include "rope/rotate.h"

namespace flexkv {
namespace {

constexpr int kLanes = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
// Unit: thread blocks. Enough to fill the largest GPUs; a rotation stands in the way of the model's own work,
// so it is not held back.
constexpr int64_t kMostBlocks = 2048;

template <typename Element, Pairing kPairing>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const RotationRows rows) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  for (; row < rows.rows; row += step) rotate_row_lane<Element, kPairing>(rows, row, lane, kLanes);
}

template <typename Element>
void launch(const RotationRows& rows, Pairing pairing, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (rows.rows + kWarps - 1) / kWarps));
  if (pairing == Pairing::kNeox) {
    rotate_kernel<Element, Pairing::kNeox><<<blocks, kThreads, 0, stream>>>(rows);
  } else {
    rotate_kernel<Element, Pairing::kGptj><<<blocks, kThreads, 0, stream>>>(rows);
  }
}

}  // namespace

std::string rotate_on_gpu(const RotationRows& rows, ElementType type, Pairing pairing, uintptr_t stream) {
  if (rows.rows == 0) return {};
  auto* on = reinterpret_cast<cudaStream_t>(stream);
  switch (type) {
    case ElementType::kFloat32:
      launch<float>(rows, pairing, on);
      break;
    case ElementType::kBfloat16:
      launch<Bfloat16>(rows, pairing, on);
      break;
    case ElementType::kFloat16:
      launch<Float16>(rows, pairing, on);
      break;
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? std::string() : std::string("rotation: ") + cudaGetErrorString(error);
}

}  // namespace flexkv
