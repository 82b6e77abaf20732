// Runs the transforms of a transfer on a GPU, after the inference engine's work.
#pragma once
#include <memory>

#include "gds/page_map.h"
#include "gds/transform/cuda_workspace.h"
#include "gds/transform/launcher.h"

namespace flexkv {

struct CudaTransforms {
  std::shared_ptr<WorkspacePool> workspaces;
  cuda::StreamHandle engine_stream;
  TransformGrid grid;
  LayoutLauncher launcher;
};

// Makes `stream` wait for `fence` or, if `fence` is null, for the work enqueued on the inference engine's
// stream so far. Returns an error message, or an empty string on success. Precondition: the GPU is current.
std::string fence_stream(const CudaTransforms& on, cuda::StreamHandle stream, StreamEvent* fence);

// Makes the transformer of one transfer. Throws CapacityError if the GPU cannot be made current or no stream
// can be made, and what the constructor of TransformTables throws. All other failures appear in the results
// of batches.
std::unique_ptr<Transformer> cuda_transformer(const CudaTransforms& on, const PageMap& map, bool into_pool,
                                              int32_t max_pages, StreamEvent* fence);

}  // namespace flexkv
