#include "transfer/cuda_device.h"
#include "transfer/registrar.h"

namespace flexkv {
namespace {

class NoRegistrar : public Registrar {
 public:
  bool active() const override { return false; }
  std::string add(void*, int64_t) override { return "built without CUDA"; }
  void remove(void*) override {}
};

}  // namespace

CudaInfo cuda_info() {
  return {.built = false, .driver_version = 0, .device_count = 0, .reason = "built without CUDA"};
}

int current_cuda_device() { return 0; }

std::shared_ptr<Registrar> cuda_registrar() { return std::make_shared<NoRegistrar>(); }

}  // namespace flexkv
