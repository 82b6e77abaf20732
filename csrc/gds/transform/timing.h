// Measures the layout transform beside a plain copy on the same device, for `flexkv bench transfer`.
#pragma once
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "gds/transform/device.h"

namespace flexkv {

// What to time: a layer-first pool of its own, [layer][block][run], and one slot per block.
struct TimedTransform {
  int32_t layers = 1;
  int64_t run_bytes = 0;
  int64_t blocks = 1;
  bool into_pool = true;  // checks digests; else makes them
};

struct TransformTime {
  double transform_s = 0;
  double copy_s = 0;  // the device's own copy of as many bytes
};

// One entry per repeat. Transform and copy alternate, after one unmeasured pair. Throws ConfigError for
// numbers out of range, CapacityError without the memory, and TransferError if a transform fails.
FLEXKV_EXPORT std::vector<TransformTime> time_transform(TransformDevice& device, const TimedTransform& what,
                                                        int32_t repeats);

}  // namespace flexkv
