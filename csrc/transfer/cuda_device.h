// What this build and this machine have of CUDA. Asking is safe everywhere: nothing is started where there is
// none.
#pragma once
#include <string>

namespace flexkv {

struct CudaInfo {
  bool built = false;      // compiled with a CUDA toolkit
  int driver_version = 0;  // as CUDA counts (13000 is 13.0); 0: no driver
  int device_count = 0;
  std::string reason;  // why no device can be used; empty when one can
};

CudaInfo cuda_info();

// The device that is current for this thread. Precondition: cuda_info().device_count > 0.
int current_cuda_device();

}  // namespace flexkv
