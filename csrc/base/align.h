// The alignment of slots and stripes in memory and in files, which direct I/O and cuFile need.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// Unit: bytes. This is cuFile's unit and the host's page size. The logical blocks of common disks are not
// larger.
inline constexpr int64_t kIoAlignBytes = 4096;

FLEXKV_HD constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace flexkv
