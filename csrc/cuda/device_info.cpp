#include "cuda/device_info.h"

#include "cuda/driver.h"

namespace flexkv::cuda {

Info device_info() {
  Info info;
  info.built = FLEXKV_WITH_CUDA != 0;
  const Driver* driver = system_driver(&info.reason);
  if (driver == nullptr) return info;
  info.driver_version = driver->version;
  const Code code = driver->device_get_count(&info.device_count);
  if (code != kSuccess) {
    info.device_count = 0;
    info.reason = driver->error_text(code, "cuDeviceGetCount");
  } else if (info.device_count == 0) {
    info.reason = "the driver reports no device";
  }
  return info;
}

int current_device() {
  const Driver* driver = system_driver();
  DeviceNumber number = 0;
  return driver != nullptr && driver->context_get_device(&number) == kSuccess ? number : 0;
}

}  // namespace flexkv::cuda
