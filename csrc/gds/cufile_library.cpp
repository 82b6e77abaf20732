#include "gds/cufile_library.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace flexkv {
namespace {

constexpr const char* kLibrary = "libcufile.so.0";

std::mutex wheels_mutex;
std::vector<std::string> wheels;

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  static_assert(sizeof(symbol) == sizeof(function));
  std::memcpy(&function, &symbol, sizeof(symbol));
  return symbol != nullptr;
}

std::string loader_words() {
  const char* words = dlerror();
  return words != nullptr ? words : std::string("cannot load ") + kLibrary;
}

// Fills `table` with pointers to the library's functions. Returns the name of the first required function
// that is missing, or an empty string if none is.
std::string fill(void* library, CufileTable& table) {
  std::string missing;
  const auto need = [&](const char* name, auto& function) {
    if (!load(library, name, function) && missing.empty()) missing = name;
  };
  need("cuFileDriverOpen", table.driver_open);
  need("cuFileDriverClose_v2", table.driver_close);
  need("cuFileDriverGetProperties", table.driver_properties);
  need("cuFileHandleRegister", table.handle_register);
  need("cuFileHandleDeregister", table.handle_deregister);
  need("cuFileBufRegister", table.buffer_register);
  need("cuFileBufDeregister", table.buffer_deregister);
  need("cuFileRead", table.read);
  need("cuFileWrite", table.write);
  load(library, "cuFileDriverSetMaxPinnedMemSize", table.set_max_pinned_kib);
  load(library, "cuFileGetVersion", table.version);
  load(library, "cuFileDriverGetP2PFlags", table.p2p_flags);
  load(library, "cuFileGetStatsLevel", table.statistics.get_level);
  load(library, "cuFileSetStatsLevel", table.statistics.set_level);
  load(library, "cuFileStatsStart", table.statistics.start);
  load(library, "cuFileStatsStop", table.statistics.stop);
  load(library, "cuFileGetStatsL3", table.statistics.level3);
  return missing;
}

std::optional<CufileLibrary> opened(void* library, const std::string& name, std::string found,
                                    std::string* why) {
  CufileLibrary result;
  if (const std::string missing = fill(library, result.table); !missing.empty()) {
    *why += "; " + name + " lacks " + missing;
    return std::nullopt;
  }
  Dl_info info{};
  void* symbol = dlsym(library, "cuFileDriverOpen");
  result.path = dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : name;
  result.found = std::move(found);
  if (result.table.version != nullptr && result.table.version(&result.version).code != 0) result.version = 0;
  why->clear();
  return result;
}

}  // namespace

void set_cufile_wheels(std::vector<std::string> paths) {
  const std::lock_guard lock(wheels_mutex);
  wheels = std::move(paths);
}

std::optional<CufileLibrary> load_cufile(std::string* why) {
  *why = std::string(kLibrary) + " was not found: it is not loaded in this process";
  if (void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD); library != nullptr) {
    if (auto result = opened(library, kLibrary, "already loaded", why)) return result;
  }
  if (void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL); library != nullptr) {
    if (auto result = opened(library, kLibrary, "by the loader", why)) return result;
  } else {
    *why += "; the loader: " + loader_words();
  }
  std::vector<std::string> paths;
  {
    const std::lock_guard lock(wheels_mutex);
    paths = wheels;
  }
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) {
      if (auto result = opened(library, path, "in a wheel", why)) return result;
    } else {
      *why += "; " + path + ": " + loader_words();
    }
  }
  if (paths.empty()) *why += "; no wheel has it";
  return std::nullopt;
}

}  // namespace flexkv
