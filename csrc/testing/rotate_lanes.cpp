#include "testing/rotate_lanes.h"

#include "rope/rotate_dispatch.h"
#include "testing/layout_lanes.h"

namespace flexkv {

void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing) {
  dispatch_rotation(type, pairing, [&]<typename Kind>(Kind) {
    for (int64_t row = rows.rows - 1; row >= 0; --row) {
      for (int lane = kWarpLanes - 1; lane >= 0; --lane) {
        rotate_row_lane<typename Kind::Element, Kind::kPairing>(rows, row, lane, kWarpLanes);
      }
    }
  });
}

}  // namespace flexkv
