// The GPU's rotation on the CPU: proves that its arithmetic gives the same bits as the vectorised one.
#pragma once
#include "rope/rotate.h"

namespace flexkv {

// Rows from last to first, lanes of a warp from last to first.
void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing);

}  // namespace flexkv
