#include "cuda/device.h"

#include "base/error.h"

namespace flexkv::cuda {
namespace {

class DeviceRegistrar : public Registrar {
 public:
  explicit DeviceRegistrar(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  std::string add(void* base, int64_t bytes) override {
    const QuietCurrent current(*device_);
    if (!current.error().empty()) return current.error();
    const Driver& driver = device_->driver();
    const Code code = driver.host_register(base, static_cast<size_t>(bytes),
                                           kHostRegisterPortable | kHostRegisterDeviceMap);
    return driver.failure(code, "cuMemHostRegister");
  }

  void remove(void* base) override {
    const QuietCurrent current(*device_);
    // A failure is ignored: when the process exits, the driver may already be unloaded, and then nothing is
    // registered any more.
    device_->driver().host_unregister(base);
  }

 private:
  const std::shared_ptr<Device> device_;
};

}  // namespace

std::shared_ptr<Device> Device::open(int ordinal) {
  std::string missing;
  const Driver* driver = system_driver(&missing);
  if (driver == nullptr) throw ConfigError("CUDA device " + std::to_string(ordinal) + ": " + missing);
  return open(ordinal, *driver);
}

std::shared_ptr<Device> Device::open(int ordinal, const Driver& driver) {
  const std::string what = "CUDA device " + std::to_string(ordinal);
  int count = 0;
  const Code counted = driver.device_get_count(&count);
  if (counted != kSuccess) throw ConfigError(what + ": " + driver.error_text(counted, "cuDeviceGetCount"));
  if (ordinal < 0 || ordinal >= count) {
    throw ConfigError(what + ": this machine has " + std::to_string(count) + ", numbered from 0");
  }
  std::shared_ptr<Device> device(new Device(ordinal, driver));
  const auto require = [&](Code code, const char* call) {
    if (code != kSuccess) throw CapacityError(what + ": " + driver.error_text(code, call));
  };
  require(driver.device_get(&device->number_, ordinal), "cuDeviceGet");
  char name[128] = {};
  require(driver.device_get_name(name, sizeof(name) - 1, device->number_), "cuDeviceGetName");
  device->name_ = name;
  char pci[32] = {};
  require(driver.device_get_pci(pci, sizeof(pci), device->number_), "cuDeviceGetPCIBusId");
  device->pci_ = pci;
  size_t total = 0;
  require(driver.device_total_mem(&total, device->number_), "cuDeviceTotalMem");
  device->total_bytes_ = static_cast<int64_t>(total);
  const auto attribute = [&](int which) {
    int value = 0;
    require(driver.device_get_attribute(&value, which, device->number_), "cuDeviceGetAttribute");
    return value;
  };
  device->multiprocessors_ = attribute(kAttributeMultiprocessors);
  device->host_addresses_work_ = attribute(kAttributeHostPointerIsDevicePointer) != 0;
  const RelaxedCapture relaxed(driver);  // needed because a new context allocates memory
  require(driver.primary_context_retain(&device->context_, device->number_), "cuDevicePrimaryCtxRetain");
  return device;
}

Device::~Device() {
  if (context_ == nullptr) return;
  const RelaxedCapture relaxed(driver_);
  driver_.primary_context_release(number_);
}

// If the driver refuses the mode, for example because it does not support the mode, the thread keeps its
// current mode.
RelaxedCapture::RelaxedCapture(const Driver& driver)
    : driver_(driver), exchanged_(driver.exchange_capture_mode(&before_) == kSuccess) {}

RelaxedCapture::~RelaxedCapture() {
  if (exchanged_) driver_.exchange_capture_mode(&before_);
}

QuietCurrent::QuietCurrent(const Device& device)
    : device_(device),
      relaxed_(device.driver()),
      error_(device.driver().failure(device.driver().context_push(device.context_), "cuCtxPushCurrent")) {}

QuietCurrent::~QuietCurrent() {
  ContextHandle popped = nullptr;
  if (error_.empty()) device_.driver().context_pop(&popped);
}

Current::Current(const Device& device) : QuietCurrent(device) {
  if (!error().empty()) throw CapacityError(error());
}

std::string bind_thread(const Device& device) {
  const Driver& driver = device.driver();
  int mode = kCaptureRelaxed;
  if (const Code code = driver.exchange_capture_mode(&mode); code != kSuccess) {
    return driver.error_text(code, "cuThreadExchangeStreamCaptureMode");
  }
  return driver.failure(driver.context_set(device.context_), "cuCtxSetCurrent");
}

void require_no_capture(const Device& device, StreamHandle stream) {
  int status = kNotCapturing;
  const Code code = device.driver().stream_is_capturing(stream, &status);
  const std::string error = device.driver().failure(code, "cuStreamIsCapturing");
  if (code == kErrorCaptureImplicit) throw ContractError(error);
  if (code != kSuccess) throw CapacityError(error);
  if (status != kNotCapturing) throw ContractError("the engine's stream is being captured into a graph");
}

std::shared_ptr<Registrar> make_registrar(std::shared_ptr<Device> device) {
  return std::make_shared<DeviceRegistrar>(std::move(device));
}

}  // namespace flexkv::cuda
