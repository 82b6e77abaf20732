// Runs the GPU's rotation on the CPU, to prove that its arithmetic gives the same bits as the vectorised one.
#pragma once
#include "rope/rotate.h"

namespace flexkv {

// Rotates rows from last to first, and within each row a warp's lanes from last to first.
void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing);

}  // namespace flexkv
