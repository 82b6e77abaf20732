// One GPU. It is used through its primary context, which the inference engine's framework uses, too.
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
  // Unit: bytes. The size of all of the device's memory.
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

// While this object exists, its thread may call the driver even if another thread captures a CUDA graph. In
// the capture mode that every thread starts with, a registration, an allocation or a query of an event would
// fail and invalidate the inference engine's capture (vllm-project/vllm#48053). Relaxed capture is safe
// because flexkv enqueues no work on a stream that is being captured.
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

// While this object exists, a device is the thread's current device, with relaxed capture. The destructor
// restores the previous device and capture mode, because the calling thread may belong to the inference
// engine. The constructor pushes the retained primary context, so no new context is created. Restoring the
// device with the runtime's cudaSetDevice instead would create the primary context of device 0 in a thread
// that never chose a device. Callers should read error(), unless they cannot react to an error in any way.
class QuietCurrent {
 public:
  explicit QuietCurrent(const Device& device);
  ~QuietCurrent();
  QuietCurrent(const QuietCurrent&) = delete;
  QuietCurrent& operator=(const QuietCurrent&) = delete;
  // Says why the driver refused the context; empty if it accepted the context.
  const std::string& error() const { return error_; }

 private:
  const Device& device_;
  const RelaxedCapture relaxed_;
  const std::string error_;
};

// Does what QuietCurrent does, but throws CapacityError if the driver refuses the context.
class Current : public QuietCurrent {
 public:
  explicit Current(const Device& device);
};

// Makes the device current, with relaxed capture, for the calling thread until the thread ends. Only for
// flexkv's own threads. Returns an empty string on success, otherwise why the driver refused it.
std::string bind_thread(const Device& device);

// Throws ContractError while the inference engine's `stream` is being captured into a CUDA graph: flexkv must
// not use a stream that is being captured, because an event on it would make flexkv's streams part of the
// graph. Throws CapacityError if the driver cannot tell whether the stream is being captured. Precondition:
// the stream's device is current.
void require_no_capture(const Device& device, StreamHandle stream);

// Returns a registrar that pins host memory for a device with cuMemHostRegister. The memory is then
// registered for all contexts (the portable flag).
std::shared_ptr<Registrar> make_registrar(std::shared_ptr<Device> device);

}  // namespace flexkv::cuda
