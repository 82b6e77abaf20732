// The CUDA support of this build and this machine. These calls are safe on every machine: without CUDA they
// start nothing.
#pragma once
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace flexkv::cuda {

struct Info {
  bool built = false;      // with a CUDA toolkit, and so with the copy kernel
  int driver_version = 0;  // as CUDA counts (13000 is 13.0); 0: no driver
  int device_count = 0;
  std::string reason;  // why no device can be used; empty when one can
};

Info device_info();

// What distinguishes a device from others of the same kind.
struct Identity {
  std::string uuid;  // "GPU-" and its digits
  std::string pci;   // its address on the bus, such as "0000:17:00.0"
};

// Makes no context. Throws ConfigError for an ordinal that does not exist or without a driver.
Identity identify(int ordinal);
Identity identify(int ordinal, const Driver& driver);

// Unit: bytes. The largest window of a PCI device's memory on the bus, which for an NVIDIA GPU is BAR1: disks
// reach no more of it at once. 0 if the kernel does not report it. `pci`: its address, such as
// "0000:17:00.0".
int64_t bar_bytes(const std::string& pci, const std::string& devices = "/sys/bus/pci/devices");

// The device whose context is current for this thread; 0 if there is none. Precondition: device_info() has
// devices.
int current_device();

}  // namespace flexkv::cuda
