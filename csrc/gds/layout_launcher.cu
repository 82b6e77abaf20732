#include <algorithm>

#include "gds/gds_layout_transform.cuh"
#include "gds/layout_launcher.h"

namespace flexkv {
namespace {

std::string launch(const TransformBatch& batch, TransformGrid grid, int multiprocessors, void* stream) {
  const int blocks = grid == TransformGrid::kWholeDevice ? multiprocessors * kTransformBlocksPerMultiprocessor
                                                         : std::min(kTransformBlocks, multiprocessors);
  const cudaError_t error = launch_layout_transform(batch, blocks, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? std::string()
                              : std::string("the layout transform's launch: ") + cudaGetErrorString(error);
}

}  // namespace

LayoutLauncher layout_launcher() { return &launch; }

}  // namespace flexkv
