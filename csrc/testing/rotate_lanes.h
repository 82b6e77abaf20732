// Runs the GPU's rotation on the CPU. Tests use it to show that the GPU's arithmetic gives the same bits as
// the CPU's vectorised rotation.
#pragma once
#include "rope/rotate.h"

namespace flexkv {

// Rotates rows from the last to the first, and in each row goes through a warp's lanes from the last to the
// first: the result must not depend on the order.
void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing);

}  // namespace flexkv
