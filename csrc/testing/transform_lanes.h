// Transform devices that run the transform kernel's own functions on the CPU, lane by lane. Tests use them to
// verify the kernel's arithmetic as far as that is possible without a GPU.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "gds/transform/arithmetic.h"
#include "gds/transform/device.h"

namespace flexkv {

// Runs a batch with one warp per leaf. Processes pages, leaves and lanes from the last to the first, to show
// that the result does not depend on their order.
void transform_lane_by_lane(const TransformBatch& batch);

// Returns a device in host memory, similar to host_transform_device(). Its launch() calls `run` for each
// batch and returns when `run` has returned.
std::shared_ptr<TransformDevice> transform_device_of(std::string name,
                                                     std::function<void(const TransformBatch&)> run);

// Returns a device from transform_device_of() that runs its batches with transform_lane_by_lane().
std::shared_ptr<TransformDevice> lane_transform_device();

}  // namespace flexkv
