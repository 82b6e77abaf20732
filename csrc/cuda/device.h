// One GPU, by its primary context: the one that the engine's framework uses too.
#pragma once
#include <memory>
#include <string>

#include "cuda/driver.h"
#include "transfer/registrar.h"

namespace flexkv::cuda {

class Device {
 public:
  // Retains the primary context. Throws ConfigError for an ordinal that does not exist or without a driver,
  // CapacityError when the driver refuses the context.
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
  // Its address on the bus, such as "0000:17:00.0".
  const std::string& pci() const { return pci_; }
  int multiprocessors() const { return multiprocessors_; }
  // Whether registered host memory has the same address on the device: if not, kernels must not touch it.
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

// For a scope, lets this thread call the driver while another thread captures a graph: in the mode that every
// thread starts with, registration, allocation or a query of an event would fail and invalidate the engine's
// capture (vllm-project/vllm#48053). We enqueue no work on a stream that is being captured.
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

// Makes a device this thread's current one for a scope, with relaxed capture, and leaves both as they were:
// the calling thread may be the engine's. Pushing a retained primary context creates no other. Restoring with
// the runtime's cudaSetDevice would, in a thread that never chose a device, create the primary context of
// device 0. For callers that report a refusal, or can do nothing about it.
class QuietCurrent {
 public:
  explicit QuietCurrent(const Device& device);
  ~QuietCurrent();
  QuietCurrent(const QuietCurrent&) = delete;
  QuietCurrent& operator=(const QuietCurrent&) = delete;
  // Empty, or why the context was refused.
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

// Makes the device current on one of our own threads until the thread ends. Returns why the context was
// refused; empty for success.
std::string bind_thread(const Device& device);

// Throws ContractError while the engine's stream is being captured: none of our calls may touch it then,
// because an event on it would draw our streams into the graph. Throws CapacityError if the driver cannot
// tell. Precondition: its device is current.
void require_no_capture(const Device& device, StreamHandle stream);

// Registers host memory with a device, for all contexts (cuMemHostRegister, portable).
std::shared_ptr<Registrar> make_registrar(std::shared_ptr<Device> device);

}  // namespace flexkv::cuda
