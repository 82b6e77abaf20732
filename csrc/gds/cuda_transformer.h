// The transforms of one transfer on a GPU.
#pragma once
#include <memory>

#include "gds/cuda_workspace.h"
#include "gds/layout_launcher.h"
#include "gds/page_map.h"

namespace flexkv {

struct CudaTransforms {
  std::shared_ptr<WorkspacePool> workspaces;
  cuda::StreamHandle engine_stream;
  TransformGrid grid;
  LayoutLauncher launcher;
};

// Makes `stream` wait for the fence, or without one for what the engine's stream has been given. Empty, or
// why it could not. With the GPU current.
std::string fence_stream(const CudaTransforms& on, cuda::StreamHandle stream, StreamEvent* fence);

// Throws CapacityError where there is no stream for it; other failures are its batches'.
std::unique_ptr<Transformer> cuda_transformer(const CudaTransforms& on, const PageMap& map, bool into_pool,
                                              int32_t max_pages, StreamEvent* fence);

}  // namespace flexkv
