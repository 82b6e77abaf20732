// Registers pool memory with a device, piece by piece (cuMemHostRegister for a GPU).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

class Registrar {
 public:
  virtual ~Registrar() = default;
  // Returns an error; empty on success. A piece without registration still works, but slower.
  virtual std::string add(void* base, int64_t bytes) = 0;
  virtual void remove(void* base) = 0;
};

// How often refused pieces are tried again, and the pause before the first retry, which doubles each time.
// The default retries for a minute: temporary causes (locked memory of a process that is ending, a driver
// that is starting) are over by then.
struct PinRetries {
  int32_t tries = 6;
  double first_pause_s = 1;
};

}  // namespace flexkv
