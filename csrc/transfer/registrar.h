// Makes pool memory known to a device, piece by piece (cuMemHostRegister for a GPU).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

class Registrar {
 public:
  virtual ~Registrar() = default;
  // Empty on success, else why not: the piece then works without registration, only slower.
  virtual std::string add(void* base, int64_t bytes) = 0;
  virtual void remove(void* base) = 0;
};

// How often pieces that were refused are tried again, and how long after the last try; the pause doubles each
// time. With the default for a minute: what refuses memory for a while (locked memory of a process that ends,
// a driver that starts) passes in that time.
struct PinRetries {
  int32_t tries = 6;
  double first_pause_s = 1;
};

}  // namespace flexkv
