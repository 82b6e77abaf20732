// A TransformDevice for a GPU. It accesses the GPU only through the driver's functions and a launcher, so
// that tests can run it without a GPU, with a fake driver and launcher.
#pragma once
#include <memory>

#include "cuda/device.h"
#include "gds/transform/device.h"
#include "gds/transform/launcher.h"

namespace flexkv {

// Makes the same kind of device as cuda_transform_device(number, ...) of device.h. As a self-test, moves a
// page from one block to another. Throws ConfigError, with the reason, if the self-test fails or the launcher
// is null.
std::shared_ptr<TransformDevice> cuda_transform_device(std::shared_ptr<cuda::Device> device,
                                                       uintptr_t engine_stream, TransformGrid grid,
                                                       LayoutLauncher launcher);

}  // namespace flexkv
