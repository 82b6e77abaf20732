// The alignment of every address, offset and length that O_DIRECT, cuFile or a DMA engine gets.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace flexkv {

// Unit: bytes. The largest logical block size of usual disks, cuFile's unit, and the host's page size.
inline constexpr int64_t kIoAlignBytes = 4096;

FLEXKV_HD constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace flexkv
