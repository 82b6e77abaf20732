// A TransformDevice for a GPU. It is built on the driver's functions, so that with a fake driver and launcher
// it needs no GPU.
#pragma once
#include <memory>

#include "cuda/device.h"
#include "gds/transform/device.h"
#include "gds/transform/launcher.h"

namespace flexkv {

// Makes a device like cuda_transform_device(number, ...) of device.h. Moves a page from one block to another
// as a self-test. Throws ConfigError, with the reason, if the test fails or the launcher is null.
std::shared_ptr<TransformDevice> cuda_transform_device(std::shared_ptr<cuda::Device> device,
                                                       uintptr_t engine_stream, TransformGrid grid,
                                                       LayoutLauncher launcher);

}  // namespace flexkv
