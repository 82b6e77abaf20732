// The sizes of a host pool, and the positions of its extents.
#pragma once
#include <cstdint>

#include "base/align.h"
#include "transfer/pool_mapping.h"

namespace flexkv {

// Unit: bytes. The maximum size of an extent, because io_uring does not register larger buffers (EFAULT).
inline constexpr int64_t kMaxExtentBytes = int64_t{1} << 30;

struct PoolGeometry {
  int64_t slot_bytes = 0;  // a multiple of 4 KiB
  int64_t slots = 0;
  int64_t extent_bytes = kMaxExtentBytes;

  bool operator==(const PoolGeometry&) const = default;

  // Throws GeometryError if a size is invalid.
  void check() const;
  // Unit: bytes. The alignment of extents: the alignment of huge pages, unless an extent is smaller than a
  // huge page.
  int64_t alignment() const;
};

// The positions of the extents in a pool. Precondition: check() accepts the geometry. Sizes are in bytes.
struct ExtentTable {
  explicit ExtentTable(const PoolGeometry& geometry);

  int64_t slots_per_extent;
  int64_t stride;       // distance from the start of one extent to the start of the next
  int64_t count;        // number of extents
  int64_t total_bytes;  // size of all extents together
  // Sizes of extents are rounded up to multiples of this many bytes.
  int64_t unit;
  PoolGeometry geometry;

  int64_t slots_of(int64_t extent) const;
  int64_t bytes_of(int64_t extent) const;
  int64_t offset_of(int64_t extent) const { return extent * stride; }
  int64_t extent_of(int64_t slot) const { return slot / slots_per_extent; }
};

}  // namespace flexkv
