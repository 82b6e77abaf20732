// Runs the transform's own functions on the CPU as a GPU would, to verify the kernel's arithmetic as far as a
// CPU can.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "gds/transform/arithmetic.h"
#include "gds/transform/device.h"

namespace flexkv {

// Runs one warp per leaf, leaves from last to first, and lanes from last to first.
void transform_lane_by_lane(const TransformBatch& batch);

// A device on plain memory, like host_transform_device(); launch() calls `run` for each batch and returns
// when `run` has returned.
std::shared_ptr<TransformDevice> transform_device_of(std::string name,
                                                     std::function<void(const TransformBatch&)> run);

// Such a device whose transforms run lane by lane.
std::shared_ptr<TransformDevice> lane_transform_device();

}  // namespace flexkv
