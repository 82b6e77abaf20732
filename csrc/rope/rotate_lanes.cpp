#include "base/error.h"
#include "layout/lane_executor.h"
#include "rope/rotate.h"

namespace flexkv {
namespace {

template <typename Element, Pairing kPairing>
void run(const RotationRows& rows) {
  for (int64_t row = rows.rows - 1; row >= 0; --row) {
    for (int lane = kWarpLanes - 1; lane >= 0; --lane) {
      rotate_row_lane<Element, kPairing>(rows, row, lane, kWarpLanes);
    }
  }
}

template <typename Element>
void run(const RotationRows& rows, Pairing pairing) {
  if (pairing == Pairing::kNeox) {
    run<Element, Pairing::kNeox>(rows);
  } else {
    run<Element, Pairing::kGptj>(rows);
  }
}

}  // namespace

int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

void rotate_lane_by_lane(const RotationRows& rows, ElementType type, Pairing pairing) {
  switch (type) {
    case ElementType::kFloat32:
      return run<float>(rows, pairing);
    case ElementType::kBfloat16:
      return run<Bfloat16>(rows, pairing);
    case ElementType::kFloat16:
      return run<Float16>(rows, pairing);
  }
}

}  // namespace flexkv
