// What CUDA support this build and this machine have. Asking is safe everywhere: nothing is started where
// there is none.
#pragma once
#include <string>

namespace flexkv::cuda {

struct Info {
  bool built = false;      // with a CUDA toolkit, and so with the copy kernel
  int driver_version = 0;  // as CUDA counts (13000 is 13.0); 0: no driver
  int device_count = 0;
  std::string reason;  // why no device can be used; empty when one can
};

Info device_info();

// The device whose context is current for this thread; 0 if there is none. Precondition: device_info() has
// devices.
int current_device();

}  // namespace flexkv::cuda
