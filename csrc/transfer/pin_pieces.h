// The pieces of a host pool that are registered with a device one at a time.
#pragma once
#include <algorithm>
#include <cstdint>

#include "transfer/pool_geometry.h"

namespace flexkv {

// Unit: bytes. The maximum size of a piece that has several slots. Registration holds locks of the driver for
// about 0.1 s per GiB of memory, and the inference engine's calls need these locks. Registering a complete
// extent at once would stall the inference engine (vllm-project/vllm#51081); a piece stalls it for only 12
// ms.
inline constexpr int64_t kPinPieceBytes = int64_t{128} << 20;

// The pieces of a pool, in numbers of slots. A piece consists of consecutive complete slots of one extent,
// because a copy across the end of a registered piece fails (LMCache/LMCache#2413).
struct PinPieces {
  explicit PinPieces(const ExtentTable& extents)
      : table(extents),
        slots_per_piece(
            std::clamp<int64_t>(kPinPieceBytes / extents.geometry.slot_bytes, 1, extents.slots_per_extent)),
        per_extent((extents.slots_per_extent + slots_per_piece - 1) / slots_per_piece),
        count((extents.count - 1) * per_extent +
              (extents.slots_of(extents.count - 1) + slots_per_piece - 1) / slots_per_piece) {}

  int64_t extent_of(int64_t piece) const { return piece / per_extent; }
  int64_t first_slot(int64_t piece) const {
    return extent_of(piece) * table.slots_per_extent + piece % per_extent * slots_per_piece;
  }
  int64_t slots_of(int64_t piece) const {
    return std::min(slots_per_piece, table.slots_of(extent_of(piece)) - piece % per_extent * slots_per_piece);
  }
  int64_t bytes_of(int64_t piece) const { return slots_of(piece) * table.geometry.slot_bytes; }
  int64_t piece_of(int64_t slot) const {
    return table.extent_of(slot) * per_extent + slot % table.slots_per_extent / slots_per_piece;
  }

  ExtentTable table;
  int64_t slots_per_piece;
  int64_t per_extent;
  int64_t count;
};

}  // namespace flexkv
