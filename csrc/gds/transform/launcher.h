// Starts layout transforms on a GPU. Only the launch needs a CUDA toolkit at build time: the code that plans
// and fences it is in every build.
#pragma once
#include <string>

#include "gds/transform/arithmetic.h"
#include "gds/transform/device.h"

namespace flexkv {

// Enqueues one batch, whose arrays are in memory of the current GPU, on `stream` (a CUstream), on as many of
// the GPU's `multiprocessors` as `grid` says. Returns an error; empty on success.
using LayoutLauncher = std::string (*)(const TransformBatch& batch, TransformGrid grid, int multiprocessors,
                                       void* stream);

// The launcher of this build; null without a CUDA toolkit.
LayoutLauncher layout_launcher();

}  // namespace flexkv
