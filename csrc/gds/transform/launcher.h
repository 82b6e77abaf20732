// Starts layout transforms on a GPU. Only the code of the launch itself needs a CUDA toolkit at build time.
// The code that plans a launch, and makes it wait for the inference engine, is in every build.
#pragma once
#include <string>

#include "gds/transform/arithmetic.h"
#include "gds/transform/device.h"

namespace flexkv {

// A function that enqueues one batch, whose arrays are in the current GPU's memory, on `stream` (a CUstream).
// The batch runs on as many of the GPU's `multiprocessors` as `grid` says. Returns an error message, or an
// empty string on success.
using LayoutLauncher = std::string (*)(const TransformBatch& batch, TransformGrid grid, int multiprocessors,
                                       void* stream);

// Returns the launcher, or null in a build without a CUDA toolkit.
LayoutLauncher layout_launcher();

}  // namespace flexkv
