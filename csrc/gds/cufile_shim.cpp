#include "gds/cufile_shim.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>

#include "base/error.h"

namespace flexkv {
namespace {

constexpr const char* kLibrary = "libcufile.so.0";
// CUfileOpError: another user in this process has opened the driver, which is as good.
constexpr int32_t kDriverAlreadyOpen = 5026;
// All bits of status_flags: local disks and network file systems alike.
constexpr uint32_t kAnyFileSystem = (1u << 16) - 1;

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  static_assert(sizeof(symbol) == sizeof(function));
  std::memcpy(&function, &symbol, sizeof(symbol));
  return symbol != nullptr;
}

// Empty on success, else what is missing. The library stays loaded: its threads may outlive any user.
std::string load_table(CufileTable& table) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return reason ? reason : std::string("cannot load ") + kLibrary;
  }
  const bool complete = load(library, "cuFileDriverOpen", table.driver_open) &&
                        load(library, "cuFileDriverClose_v2", table.driver_close) &&
                        load(library, "cuFileDriverGetProperties", table.driver_properties) &&
                        load(library, "cuFileHandleRegister", table.handle_register) &&
                        load(library, "cuFileHandleDeregister", table.handle_deregister) &&
                        load(library, "cuFileBufRegister", table.buffer_register) &&
                        load(library, "cuFileBufDeregister", table.buffer_deregister) &&
                        load(library, "cuFileRead", table.read) && load(library, "cuFileWrite", table.write);
  return complete ? std::string() : std::string(kLibrary) + " lacks a function that is needed";
}

}  // namespace

std::string to_string(const CufileError& error) {
  std::string text = "cuFile error " + std::to_string(error.code);
  if (error.cuda_code != 0) text += " (CUDA error " + std::to_string(error.cuda_code) + ")";
  return text;
}

Cufile::Cufile(const CufileTable& table) : table_(table) {
  const CufileError opened = table_.driver_open();
  if (opened.code != 0 && opened.code != kDriverAlreadyOpen) {
    throw ConfigError("cuFileDriverOpen: " + to_string(opened));
  }
  opened_ = opened.code == 0;
  CufileProperties properties{};
  const CufileError asked = table_.driver_properties(&properties);
  if (asked.code != 0) {
    if (opened_) table_.driver_close();
    throw ConfigError("cuFileDriverGetProperties: " + to_string(asked));
  }
  // Without a kernel driver, or with one that can serve no file system, every call is a POSIX call inside.
  const bool served = (properties.nvfs.status_flags & kAnyFileSystem) != 0;
  mode_ = served ? CufileMode::kDirect : CufileMode::kCompat;
  version_ =
      std::to_string(properties.nvfs.major_version) + "." + std::to_string(properties.nvfs.minor_version);
}

Cufile::~Cufile() {
  if (opened_) table_.driver_close();
}

std::string Cufile::describe() const {
  if (mode_ == CufileMode::kDirect) return "cuFile, GPUDirect Storage (nvidia-fs " + version_ + ")";
  return "cuFile in compatibility mode (no GPUDirect Storage)";
}

std::shared_ptr<Cufile> shared_cufile(int32_t gpu_count, std::string* why) {
  if (gpu_count < 1) {
    *why = "no GPU";
    return nullptr;
  }
  static std::mutex mutex;
  static std::weak_ptr<Cufile> opened;
  const std::lock_guard lock(mutex);
  if (auto cufile = opened.lock()) return cufile;
  CufileTable table;
  *why = load_table(table);
  if (!why->empty()) return nullptr;
  try {
    auto cufile = std::make_shared<Cufile>(table);
    opened = cufile;
    return cufile;
  } catch (const ConfigError& error) {
    *why = error.what();
    return nullptr;
  }
}

}  // namespace flexkv
