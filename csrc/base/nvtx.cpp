#include "base/nvtx.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"

namespace flexkv::nvtx {

std::atomic<const Functions*> functions = nullptr;

void load(const std::string& library) {
  static std::mutex mutex;
  static Functions loaded;
  const std::lock_guard lock(mutex);
  if (functions.load(std::memory_order_relaxed) != nullptr) return;
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* words = dlerror();
    throw ConfigError("NVTX cannot be loaded: " + std::string(words != nullptr ? words : library));
  }
  loaded.push = reinterpret_cast<int (*)(const char*)>(dlsym(handle, "nvtxRangePushA"));
  loaded.pop = reinterpret_cast<int (*)()>(dlsym(handle, "nvtxRangePop"));
  if (loaded.push == nullptr || loaded.pop == nullptr) {
    dlclose(handle);
    throw ConfigError("NVTX cannot be loaded: " + library + " has no nvtxRangePushA and nvtxRangePop");
  }
  functions.store(&loaded, std::memory_order_release);
}

}  // namespace flexkv::nvtx
