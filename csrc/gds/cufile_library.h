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
  std::string found;    // how the library was found: "already loaded", "by the loader" or "in a wheel"
  int32_t version = 0;  // 1200 means 1.20; 0 if the library does not report its version
};

// Sets the paths of libcufile in installed wheels. load_cufile() tries these paths in this order, after a
// library that is already loaded and the library that the loader finds. Python code calls this function,
// because it can find where packages are installed.
FLEXKV_EXPORT void set_cufile_wheels(std::vector<std::string> paths);

// Loads libcufile without opening its driver, so that no GPU is needed. If libcufile cannot be loaded,
// returns nothing and sets `why` to a list of the places searched, each with the reason why the library could
// not be loaded from there. The library is never unloaded, because its threads may outlive all its users.
FLEXKV_EXPORT std::optional<CufileLibrary> load_cufile(std::string* why);

}  // namespace flexkv
