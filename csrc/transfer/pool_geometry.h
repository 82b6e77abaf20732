// The sizes of a host pool and where its extents lie.
#pragma once
#include <cstdint>

#include "base/align.h"
#include "transfer/pool_mapping.h"

namespace flexkv {

// Unit: bytes. io_uring refuses a registered buffer above 1 GiB (EFAULT), so no extent is larger.
inline constexpr int64_t kMaxExtentBytes = int64_t{1} << 30;

struct PoolGeometry {
  int64_t slot_bytes = 0;  // a multiple of 4 KiB
  int64_t slots = 0;
  int64_t extent_bytes = kMaxExtentBytes;

  bool operator==(const PoolGeometry&) const = default;

  // Throws GeometryError.
  void check() const;
  // Unit: bytes. Where extents start: huge pages, unless the pool is smaller than one.
  int64_t alignment() const;
};

// The extents of a geometry that check() accepts. Sizes are in bytes.
struct ExtentTable {
  explicit ExtentTable(const PoolGeometry& geometry);

  int64_t slots_per_extent;
  int64_t stride;       // from one extent to the next
  int64_t count;        // of extents
  int64_t total_bytes;  // of all
  int64_t unit;         // sizes are rounded up to multiples of this
  PoolGeometry geometry;

  int64_t slots_of(int64_t extent) const;
  int64_t bytes_of(int64_t extent) const;
  int64_t offset_of(int64_t extent) const { return extent * stride; }
  int64_t extent_of(int64_t slot) const { return slot / slots_per_extent; }
};

}  // namespace flexkv
