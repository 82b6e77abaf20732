// The interface through which a host pool registers its memory with a device, piece by piece. For a GPU,
// registration is a call of cuMemHostRegister.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

class Registrar {
 public:
  virtual ~Registrar() = default;
  // Registers a piece. Returns an error message, or an empty string on success. Copies to and from a piece
  // that is not registered still work, but are slower.
  virtual std::string add(void* base, int64_t bytes) = 0;
  virtual void remove(void* base) = 0;
};

// How often and when the registration of refused pieces is tried again. With the default values, retries go
// on for a minute. Most temporary causes end within this time: for example, an exiting process that still has
// locked memory, or a driver that is still starting.
struct PinRetries {
  int32_t tries = 6;         // number of retries
  double first_pause_s = 1;  // seconds before the first retry; the pause doubles before each further retry
};

}  // namespace flexkv
