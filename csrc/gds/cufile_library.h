// libcufile: where it lies in this process or on this machine.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/export.h"
#include "gds/cufile_shim.h"

namespace flexkv {

struct CufileLibrary {
  CufileTable table;
  std::string path;
  std::string found;    // "already loaded", "by the loader" or "in a wheel"
  int32_t version = 0;  // 1200 is 1.20; 0 where it does not say
};

// Paths of libcufile in wheels, tried in order after what is loaded already and what the loader finds. Said
// by Python, which knows where packages lie.
FLEXKV_EXPORT void set_cufile_wheels(std::vector<std::string> paths);

// Loads it, and does not open its driver: needs no GPU. Unset where it cannot be had; `why` says what was
// searched and what each place answered. The library stays loaded: its threads may outlive any user.
FLEXKV_EXPORT std::optional<CufileLibrary> load_cufile(std::string* why);

}  // namespace flexkv
