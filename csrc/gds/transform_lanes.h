// Runs the transform's own functions on the CPU as a GPU would: the proof that the kernel's arithmetic is
// right, as far as a CPU can give it.
#pragma once
#include "gds/layout_transform.h"

namespace flexkv {

// One warp a leaf, leaves from last to first, lanes from last to first.
void transform_lane_by_lane(const TransformBatch& batch);

}  // namespace flexkv
