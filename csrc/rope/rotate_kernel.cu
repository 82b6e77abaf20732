#include <cuda_runtime.h>

#include "rope/rotate.h"
#include "rope/rotate_kernel.cuh"

namespace flexkv {
namespace {

// Unit: thread blocks. The maximum number of blocks per launch: enough to fill the largest GPUs.
constexpr int kMostBlocks = 2048;

template <typename Element>
void launch(const RotationRows& rows, Pairing pairing, cudaStream_t stream) {
  const int blocks = blocks_for(rows.rows, kRotateThreads, kMostBlocks);
  if (pairing == Pairing::kNeox) {
    rotate_kernel<Element, Pairing::kNeox><<<blocks, kRotateThreads, 0, stream>>>(rows);
  } else {
    rotate_kernel<Element, Pairing::kGptj><<<blocks, kRotateThreads, 0, stream>>>(rows);
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
