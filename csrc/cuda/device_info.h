// Functions that report the CUDA support of this build and this machine. They can be called on every machine,
// even on one without CUDA.
#pragma once
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace flexkv::cuda {

struct Info {
  bool built = false;      // this build was made with a CUDA toolkit, so it has the copy kernel
  int driver_version = 0;  // in CUDA's notation (13000 is 13.0); 0: no driver
  int device_count = 0;
  // Why no device can be used. Empty if at least one can be used.
  std::string reason;
};

Info device_info();

// Distinguishes a device from others of the same model.
struct Identity {
  std::string uuid;  // such as "GPU-1b2c3d4e-...", as nvidia-smi shows it
  std::string pci;   // address on the PCI bus, such as "0000:17:00.0"
};

// Returns the identity of a device. Does not create a context. Throws ConfigError if the machine has no
// driver or no device with this ordinal.
Identity identify(int ordinal);
Identity identify(int ordinal, const Driver& driver);

// Unit: bytes. The size of the largest window (BAR) through which other devices reach a PCI device's memory.
// For an NVIDIA GPU this window is BAR1; disks cannot access more of the GPU's memory than this at the same
// time. Returns 0 if the Linux kernel does not report the window. `pci`: the device's address, such as
// "0000:17:00.0". `devices`: the folder in which the kernel lists PCI devices.
int64_t bar_bytes(const std::string& pci, const std::string& devices = "/sys/bus/pci/devices");

// Returns the ordinal of the device whose context is current for this thread, or 0 if there is none.
// Precondition: device_info() found a device.
int current_device();

}  // namespace flexkv::cuda
