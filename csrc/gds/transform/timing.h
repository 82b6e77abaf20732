// Measures how long the layout transform takes, and for comparison a plain copy on the same device, for
// `flexkv bench transfer`.
#pragma once
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "gds/transform/device.h"

namespace flexkv {

// What to time. time_transform() allocates a layer-first pool, [layer][block][run], and one slot per block.
struct TimedTransform {
  int32_t layers = 1;
  int64_t run_bytes = 0;
  int64_t blocks = 1;
  bool into_pool = true;  // slot -> pool with checked digests; if false, pool -> slot with new digests
};

struct TransformTime {
  double transform_s = 0;
  double copy_s = 0;  // duration of the device's own copy of the same number of bytes
};

// Measures `repeats` transforms and copies in alternation, and returns one entry per repeat. The first
// transform and the first copy are not counted. Throws ConfigError if a number is out of range, CapacityError
// if there is not enough memory, and TransferError if a transform fails.
FLEXKV_EXPORT std::vector<TransformTime> time_transform(TransformDevice& device, const TimedTransform& what,
                                                        int32_t repeats);

}  // namespace flexkv
