// One GPU, used through its primary context, which the engine's framework uses too.
#pragma once
#include <memory>
#include <string>

#include "cuda/driver.h"
#include "transfer/registrar.h"

namespace flexkv::cuda {

class Device {
 public:
  // Retains the primary context. Throws ConfigError if the machine has no driver or no device with this
  // ordinal, and CapacityError if the driver refuses the context.
  static std::shared_ptr<Device> open(int ordinal);
  static std::shared_ptr<Device> open(int ordinal, const Driver& driver);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  // Unit: bytes. All of the device's memory.
  int64_t total_bytes() const { return total_bytes_; }
  // The device's address on the PCI bus, such as "0000:17:00.0".
  const std::string& pci() const { return pci_; }
  int multiprocessors() const { return multiprocessors_; }
  // Whether registered host memory has the same address on the device. If not, kernels must not access it.
  bool host_addresses_work() const { return host_addresses_work_; }

 private:
  friend class QuietCurrent;
  friend std::string bind_thread(const Device& device);
  Device(int ordinal, const Driver& driver) : driver_(driver), ordinal_(ordinal) {}

  const Driver driver_;
  const int ordinal_;
  DeviceNumber number_ = 0;
  ContextHandle context_ = nullptr;
  std::string name_;
  std::string pci_;
  int64_t total_bytes_ = 0;
  int multiprocessors_ = 1;
  bool host_addresses_work_ = false;
};

// For a scope, lets this thread call the driver while another thread captures a graph. In the capture mode
// that every thread starts with, a registration, an allocation or a query of an event would fail and
// invalidate the engine's capture (vllm-project/vllm#48053). This is safe because flexkv enqueues no work on
// a stream that is being captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int before_ = kCaptureRelaxed;
  const bool exchanged_;
};

// Makes a device this thread's current device for a scope, with relaxed capture. Then restores the former
// device and capture mode, because the calling thread may be the engine's. It pushes the retained primary
// context, which creates no new context. Restoring the device with the runtime's cudaSetDevice instead would
// create the primary context of device 0 in a thread that never chose a device. Callers should read error(),
// unless they can do nothing about a refusal.
class QuietCurrent {
 public:
  explicit QuietCurrent(const Device& device);
  ~QuietCurrent();
  QuietCurrent(const QuietCurrent&) = delete;
  QuietCurrent& operator=(const QuietCurrent&) = delete;
  // Why the driver refused the context; empty if it accepted the context.
  const std::string& error() const { return error_; }

 private:
  const Device& device_;
  const RelaxedCapture relaxed_;
  const std::string error_;
};

// Like QuietCurrent, but throws CapacityError if the context is refused.
class Current : public QuietCurrent {
 public:
  explicit Current(const Device& device);
};

// Makes the device current, with relaxed capture, on one of flexkv's own threads until the thread ends.
// Returns an empty string on success, otherwise why the driver refused.
std::string bind_thread(const Device& device);

// Throws ContractError while the engine's `stream` is being captured into a graph: flexkv must not use a
// stream that is being captured, because an event on it would make flexkv's streams part of the graph. Throws
// CapacityError if the driver cannot tell whether the stream is being captured. Precondition: the stream's
// device is current.
void require_no_capture(const Device& device, StreamHandle stream);

// Returns a registrar that pins host memory for a device with cuMemHostRegister. The memory is then
// registered for all contexts (the portable flag).
std::shared_ptr<Registrar> make_registrar(std::shared_ptr<Device> device);

}  // namespace flexkv::cuda
