// Runs the GPU's rotation on the CPU. Tests use it to show that the GPU's arithmetic gives the same bits as
// the vectorised rotation on the CPU.
#pragma once
#include "rope/rotate.h"

namespace flexkv {

// Rotates rows from the last to the first, and processes the lanes of a warp from the last to the first, to
// show that the result does not depend on the order.
void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing);

}  // namespace flexkv
