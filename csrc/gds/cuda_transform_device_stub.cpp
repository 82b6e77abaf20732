#include "base/error.h"
#include "gds/transform_device.h"

namespace flexkv {

std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t, TransformGrid) {
  throw ConfigError("GPU " + std::to_string(number) + ": this is a build without CUDA; allowed is " +
                    std::to_string(kHostDevice) + " (plain memory)");
}

}  // namespace flexkv
