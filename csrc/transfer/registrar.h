// Makes pool memory known to a device, extent by extent (cudaHostRegister for a GPU).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

class Registrar {
 public:
  virtual ~Registrar() = default;
  // Whether there is a device to register with; if not, nothing else is called.
  virtual bool active() const = 0;
  // Empty on success, else why not: the extent then works without registration, only slower.
  virtual std::string add(void* base, int64_t bytes) = 0;
  virtual void remove(void* base) = 0;
};

// The CUDA one; inactive without a CUDA build, a driver or a device, none of which it ever starts in that
// case.
std::shared_ptr<Registrar> cuda_registrar();

}  // namespace flexkv
