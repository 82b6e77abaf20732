#include "transfer/pool_geometry.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace flexkv {

void PoolGeometry::check() const {
  if (slot_bytes <= 0 || slot_bytes % kIoAlignBytes != 0) {
    throw GeometryError("slot_bytes=" + std::to_string(slot_bytes) + ": must be a positive multiple of " +
                        std::to_string(kIoAlignBytes));
  }
  if (extent_bytes < slot_bytes || extent_bytes > kMaxExtentBytes) {
    throw GeometryError("extent_bytes=" + std::to_string(extent_bytes) + ": must be in [slot_bytes=" +
                        std::to_string(slot_bytes) + ", " + std::to_string(kMaxExtentBytes) + "]");
  }
  // A pool may take at most half of the user address space, so that sums of sizes cannot overflow.
  const int64_t most = std::min<int64_t>((int64_t{1} << 46) / slot_bytes, INT32_MAX);
  if (slots < 1 || slots > most) {
    throw GeometryError("slots=" + std::to_string(slots) + ": must be in [1, " + std::to_string(most) + "]");
  }
}

int64_t PoolGeometry::alignment() const {
  return std::min(extent_bytes, slots * slot_bytes) >= kHugePageBytes ? kHugePageBytes : kIoAlignBytes;
}

ExtentTable::ExtentTable(const PoolGeometry& g)
    : slots_per_extent(g.extent_bytes / g.slot_bytes),
      stride(round_up(slots_per_extent * g.slot_bytes, g.alignment())),
      count((g.slots + slots_per_extent - 1) / slots_per_extent),
      total_bytes(0),
      unit(g.alignment()),
      geometry(g) {
  total_bytes = (count - 1) * stride + bytes_of(count - 1);
}

int64_t ExtentTable::slots_of(int64_t extent) const {
  return std::min(slots_per_extent, geometry.slots - extent * slots_per_extent);
}

int64_t ExtentTable::bytes_of(int64_t extent) const {
  return round_up(slots_of(extent) * geometry.slot_bytes, unit);
}

}  // namespace flexkv
