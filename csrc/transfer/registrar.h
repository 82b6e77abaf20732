// Makes pool memory known to a device, extent by extent (cuMemHostRegister for a GPU).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

class Registrar {
 public:
  virtual ~Registrar() = default;
  // Empty on success, else why not: the extent then works without registration, only slower.
  virtual std::string add(void* base, int64_t bytes) = 0;
  virtual void remove(void* base) = 0;
};

}  // namespace flexkv
