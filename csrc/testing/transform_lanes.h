// Runs the transform's own functions on the CPU as a GPU would: the proof that the kernel's arithmetic is
// right, as far as a CPU can give it.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "gds/layout_transform.h"
#include "gds/transform_device.h"

namespace flexkv {

// One warp a leaf, leaves from last to first, lanes from last to first.
void transform_lane_by_lane(const TransformBatch& batch);

// Plain memory, as host_transform_device(), with batches that `run` does while it is called.
std::shared_ptr<TransformDevice> transform_device_of(std::string name,
                                                     std::function<void(const TransformBatch&)> run);

// The same with transforms that run lane by lane.
std::shared_ptr<TransformDevice> lane_transform_device();

}  // namespace flexkv
