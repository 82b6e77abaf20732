#include "cuda/driver.h"

#include <dlfcn.h>

namespace flexkv::cuda {
namespace {

// For each function, the driver is asked for the variant of one of these CUDA versions. kBaseVersion is 12.0,
// which introduced cuGetProcAddress_v2.
constexpr int kBaseVersion = 12000;
constexpr int kBatchVersion = 12080;
constexpr int kBatchVersionWithoutIndex = 13000;

template <typename Function>
bool find_one(FindFunction find, const char* name, int version, Function& function) {
  void* found = nullptr;
  int status = 0;
  if (find(name, &found, version, 0, &status) != kSuccess || found == nullptr) return false;
  function = reinterpret_cast<Function>(found);
  return true;
}

LoadedDriver load_system_driver() {
  // The library is never closed, because the driver has threads that keep running.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {{}, "no NVIDIA driver"};
  const auto find = reinterpret_cast<FindFunction>(dlsym(library, "cuGetProcAddress_v2"));
  if (find == nullptr) return {{}, "the NVIDIA driver is older than CUDA 12.0"};
  return find_functions(find);
}

}  // namespace

std::string Driver::error_text(Code code, const char* what) const {
  const char* words = nullptr;
  if (get_error_string == nullptr || get_error_string(code, &words) != kSuccess) words = nullptr;
  return std::string(what) + ": " + (words != nullptr ? words : "CUDA error " + std::to_string(code));
}

LoadedDriver find_functions(FindFunction find) {
  LoadedDriver loaded;
  Driver& d = loaded.driver;
  const auto need = [&](const char* name, auto& function) {
    if (!find_one(find, name, kBaseVersion, function) && loaded.missing.empty()) {
      loaded.missing = std::string("the NVIDIA driver has no ") + name;
    }
  };
  need("cuGetErrorString", d.get_error_string);
  need("cuInit", d.init);
  need("cuDriverGetVersion", d.driver_get_version);
  need("cuDeviceGetCount", d.device_get_count);
  need("cuDeviceGet", d.device_get);
  need("cuDeviceGetName", d.device_get_name);
  need("cuDeviceGetPCIBusId", d.device_get_pci);
  need("cuDeviceGetUuid", d.device_get_uuid);
  need("cuDeviceTotalMem", d.device_total_mem);
  need("cuDeviceGetAttribute", d.device_get_attribute);
  need("cuDevicePrimaryCtxRetain", d.primary_context_retain);
  need("cuDevicePrimaryCtxRelease", d.primary_context_release);
  need("cuCtxPushCurrent", d.context_push);
  need("cuCtxPopCurrent", d.context_pop);
  need("cuCtxSetCurrent", d.context_set);
  need("cuCtxGetDevice", d.context_get_device);
  need("cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
  need("cuStreamIsCapturing", d.stream_is_capturing);
  need("cuStreamCreateWithPriority", d.stream_create);
  need("cuCtxGetStreamPriorityRange", d.stream_priority_range);
  need("cuStreamQuery", d.stream_query);
  need("cuStreamWriteValue32", d.stream_write_value);
  need("cuStreamDestroy", d.stream_destroy);
  need("cuStreamSynchronize", d.stream_synchronize);
  need("cuStreamWaitEvent", d.stream_wait_event);
  need("cuEventCreate", d.event_create);
  need("cuEventRecord", d.event_record);
  need("cuEventQuery", d.event_query);
  need("cuEventSynchronize", d.event_synchronize);
  need("cuEventDestroy", d.event_destroy);
  need("cuMemHostRegister", d.host_register);
  need("cuMemHostUnregister", d.host_unregister);
  need("cuMemHostAlloc", d.host_alloc);
  need("cuMemFreeHost", d.host_free);
  need("cuMemAlloc", d.mem_alloc);
  need("cuMemFree", d.mem_free);
  need("cuMemcpyHtoDAsync", d.copy_to_device);
  need("cuMemcpyDtoHAsync", d.copy_to_host);
  need("cuMemcpyAsync", d.copy_any);
  need("cuMemsetD8Async", d.memset_bytes);
  need("cuPointerGetAttribute", d.pointer_attribute);
  if (!loaded.missing.empty()) return loaded;
  if (const Code code = d.driver_get_version(&d.version); code != kSuccess) {
    loaded.missing = d.error_text(code, "cuDriverGetVersion");
    return loaded;
  }
  if (const Code code = d.init(0); code != kSuccess) {
    loaded.missing = d.error_text(code, "cuInit");
    return loaded;
  }
  // The function's parameters depend on the CUDA version, so exactly one version is requested. If the driver
  // has no such function, each copy needs its own call.
  if (d.version >= kBatchVersionWithoutIndex) {
    find_one(find, "cuMemcpyBatchAsync", kBatchVersionWithoutIndex, d.batch_13000);
  } else if (d.version >= kBatchVersion) {
    find_one(find, "cuMemcpyBatchAsync", kBatchVersion, d.batch_12080);
  }
  return loaded;
}

const Driver* system_driver(std::string* missing) {
  // Never destroyed, because threads that use the table may outlive main().
  static const auto* loaded = new LoadedDriver(load_system_driver());
  if (missing != nullptr) *missing = loaded->missing;
  return loaded->missing.empty() ? &loaded->driver : nullptr;
}

}  // namespace flexkv::cuda
