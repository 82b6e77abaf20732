// Finds libcufile in this process or on this machine.
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
  int32_t version = 0;  // 1200 is 1.20; 0 if the library does not report it
};

// Sets the paths of libcufile in wheels, tried in order after a library already loaded and the one that the
// loader finds. Python calls this, because it knows where packages are installed.
FLEXKV_EXPORT void set_cufile_wheels(std::vector<std::string> paths);

// Loads libcufile without opening its driver, so that no GPU is needed. Unset if it cannot be loaded: `why`
// then names the places searched and why each failed. The library stays loaded, because its threads may
// outlive any user.
FLEXKV_EXPORT std::optional<CufileLibrary> load_cufile(std::string* why);

}  // namespace flexkv
