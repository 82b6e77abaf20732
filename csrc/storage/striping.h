// Maps a place of the disk tier to a disk and a slot on that disk. Consecutive places are on consecutive
// disks.
//
// Raw files (gds/raw/raw_file.h) use the same rule if their `round_robin` is 1. A test compares the two
// rules.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

struct StripedSlot {
  int32_t disk = 0;
  int32_t slot = 0;
};

// Preconditions: 0 <= place, 0 < disks.
constexpr StripedSlot striped_slot(int32_t place, int32_t disks) { return {place % disks, place / disks}; }

// Returns the name of a slot for failure reasons: the disk's number and the slot's number in the slab. `fsck`
// uses the same names.
inline std::string slot_name(int32_t disk, int64_t slot) {
  return "disk " + std::to_string(disk) + ", slot " + std::to_string(slot);
}

}  // namespace flexkv
