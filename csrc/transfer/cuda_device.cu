#include <cuda_runtime.h>

#include "transfer/cuda_device.h"
#include "transfer/registrar.h"

namespace flexkv {
namespace {

// Registers through the device that is current where this is made: extents come up on a thread of their own,
// on which device 0 would be current, and every rank of a node would make a context there.
class CudaRegistrar : public Registrar {
 public:
  CudaRegistrar() {
    if (devices_ > 0) device_ = current_cuda_device();
  }
  bool active() const override { return devices_ > 0; }

  std::string add(void* base, int64_t bytes) override {
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) {
      error = cudaHostRegister(base, static_cast<size_t>(bytes), cudaHostRegisterPortable);
    }
    if (error == cudaSuccess) return {};
    cudaGetLastError();  // a sticky copy of this error would be blamed on the next launch
    return std::string("cudaHostRegister: ") + cudaGetErrorString(error);
  }

  void remove(void* base) override {
    if (cudaHostUnregister(base) != cudaSuccess)
      cudaGetLastError();  // at exit the driver may be gone already
  }

 private:
  int devices_ = cuda_info().device_count;
  int device_ = 0;
};

}  // namespace

CudaInfo cuda_info() {
  CudaInfo info;
  info.built = true;
  // Version first: it loads no context, and 0 means that there is no driver to ask anything else.
  if (cudaDriverGetVersion(&info.driver_version) != cudaSuccess || info.driver_version == 0) {
    info.driver_version = 0;
    info.reason = "no NVIDIA driver";
    return info;
  }
  const cudaError_t error = cudaGetDeviceCount(&info.device_count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    info.device_count = 0;
    info.reason = std::string("cudaGetDeviceCount: ") + cudaGetErrorString(error);
  } else if (info.device_count == 0) {
    info.reason = "the driver reports no device";
  }
  return info;
}

int current_cuda_device() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    device = 0;
  }
  return device;
}

std::shared_ptr<Registrar> cuda_registrar() { return std::make_shared<CudaRegistrar>(); }

}  // namespace flexkv
