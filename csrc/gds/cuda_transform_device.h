// A GPU that transforms, over the driver's functions: with a fake driver and launcher it runs without one.
#pragma once
#include <memory>

#include "cuda/device.h"
#include "gds/layout_launcher.h"
#include "gds/transform_device.h"

namespace flexkv {

// Like cuda_transform_device(number, ...) of transform_device.h. Transforms a few bytes there and back first:
// throws ConfigError, with the reason, if these do not come back, or the launcher is null.
std::shared_ptr<TransformDevice> cuda_transform_device(std::shared_ptr<cuda::Device> device,
                                                       uintptr_t engine_stream, TransformGrid grid,
                                                       LayoutLauncher launcher);

}  // namespace flexkv
