#include "cuda/device_info.h"

#include <algorithm>
#include <fstream>

#include "base/error.h"
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

Identity identify(int ordinal) {
  std::string missing;
  const Driver* driver = system_driver(&missing);
  if (driver == nullptr) throw ConfigError("CUDA device " + std::to_string(ordinal) + ": " + missing);
  return identify(ordinal, *driver);
}

Identity identify(int ordinal, const Driver& driver) {
  const auto require = [&](Code code, const char* call) {
    if (code == kSuccess) return;
    throw ConfigError("CUDA device " + std::to_string(ordinal) + ": " + driver.error_text(code, call));
  };
  DeviceNumber number = 0;
  require(driver.device_get(&number, ordinal), "cuDeviceGet");
  Uuid uuid;
  require(driver.device_get_uuid(&uuid, number), "cuDeviceGetUuid");
  char pci[32] = {};
  require(driver.device_get_pci(pci, sizeof(pci), number), "cuDeviceGetPCIBusId");
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    static constexpr char kDigits[] = "0123456789abcdef";
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[static_cast<unsigned char>(uuid.bytes[i]) >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return {text, pci};
}

int64_t bar_bytes(const std::string& pci, const std::string& devices) {
  std::string folder = pci;  // sysfs writes the address in lower case
  for (char& letter : folder)
    letter = letter >= 'A' && letter <= 'F' ? static_cast<char>(letter + 32) : letter;
  std::ifstream windows(devices + "/" + folder + "/resource");
  int64_t most = 0;
  // Each line describes one window: the addresses of its first and last byte, and its flags. If a window does
  // not exist, its line has zeros.
  std::string flags;
  for (uint64_t first = 0, last = 0; windows >> std::hex >> first >> last >> flags;) {
    if (last > first) most = std::max(most, static_cast<int64_t>(last - first + 1));
  }
  return most;
}

int current_device() {
  const Driver* driver = system_driver();
  DeviceNumber number = 0;
  return driver != nullptr && driver->context_get_device(&number) == kSuccess ? number : 0;
}

}  // namespace flexkv::cuda
