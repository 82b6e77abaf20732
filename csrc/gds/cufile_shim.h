// cuFile's functions, loaded at run time. The declarations are ours, after the ABI of libcufile.so.0 (CUDA 12
// and 13): nothing of it is needed to build.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "gds/cufile_statistics.h"
#include "gds/cufile_watch.h"

namespace flexkv {

using CufileHandle = void*;

struct CufileDescription {
  int32_t type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
  union {
    int fd;
    void* handle;
  } file = {};
  const void* file_system_ops = nullptr;
};

struct CufileProperties {
  struct {
    uint32_t major_version;
    uint32_t minor_version;
    size_t poll_threshold_bytes;
    size_t max_direct_io_bytes;
    uint32_t status_flags;   // a bit for each kind of file system that GPUDirect can serve
    uint32_t control_flags;  // bit 0: polling, bit 1: compatibility mode allowed
  } nvfs;
  uint32_t feature_flags;  // bit 4: PCI P2PDMA
  uint32_t max_device_cache_kib;
  uint32_t per_buffer_cache_kib;
  uint32_t max_device_pinned_kib;
  uint32_t max_batch_entries;
  uint32_t max_batch_timeout_ms;
  uint64_t reserved[32];  // newer libraries may write more than is declared here
};

// One entry a function; a test fills in its own. What is null where a library has it not says its first
// version.
struct CufileTable {
  CufileError (*driver_open)() = nullptr;
  CufileError (*driver_close)() = nullptr;
  CufileError (*driver_properties)(CufileProperties*) = nullptr;
  CufileError (*handle_register)(CufileHandle*, CufileDescription*) = nullptr;
  void (*handle_deregister)(CufileHandle) = nullptr;
  CufileError (*buffer_register)(const void*, size_t, int) = nullptr;
  CufileError (*buffer_deregister)(const void*) = nullptr;
  ssize_t (*read)(CufileHandle, void*, size_t, off_t file_offset, off_t buffer_offset) = nullptr;
  ssize_t (*write)(CufileHandle, const void*, size_t, off_t file_offset, off_t buffer_offset) = nullptr;
  CufileError (*version)(int32_t*) = nullptr;                               // 1.7
  CufileError (*p2p_flags)(int32_t file_system, int32_t* flags) = nullptr;  // 1.16
  CufileStatisticsTable statistics;                                         // 1.15
};

// cuFile with its driver open.
class Cufile {
 public:
  // Opens the driver of `table` and asks what it can do. Throws ConfigError, saying why, if it does not open.
  explicit Cufile(const CufileTable& table);
  ~Cufile();
  Cufile(const Cufile&) = delete;
  Cufile& operator=(const Cufile&) = delete;

  const CufileTable& table() const { return table_; }
  // By what a disk and a GPU may exchange bytes here, "nvidia-fs 2.0" or "PCI P2PDMA": whether a file does is
  // known of each file alone. Empty where every call is a POSIX call inside cuFile (compatibility mode).
  const std::string& direct_by() const { return direct_by_; }
  // Why cuFile does not say how its calls went; empty where it does.
  const std::string& uncounted() const { return statistics_->refusal(); }
  CufileWatch& watch() { return *watch_; }

 private:
  CufileTable table_;
  bool opened_ = false;  // by us, and so ours to close
  std::string direct_by_;
  std::unique_ptr<CufileStatistics> statistics_;
  std::unique_ptr<CufileWatch> watch_;
};

// One open driver for all its users. It stays open when the last of them has gone: libcufile 1.15 crashes in
// a thread of its own after some two dozen cycles of opening and closing.
class CufileUsers {
 public:
  // Opens the driver of what `load` returns where it is not open; null where that is. Throws what Cufile
  // throws.
  std::shared_ptr<Cufile> join(const std::function<std::optional<CufileTable>()>& load);

 private:
  std::mutex mutex_;  // held while the driver opens
  std::shared_ptr<Cufile> cufile_;
};

inline constexpr const char* kCufileCompat = "cuFile in compatibility mode (no GPUDirect Storage)";

// One for the process, opened by the first call. Null without a GPU - cuFile is not even loaded then, because
// its driver may hang on opening - or where it cannot be had; `why` says which.
std::shared_ptr<Cufile> shared_cufile(int32_t gpu_count, std::string* why);

// "1.20" of what cuFileGetVersion answers: 1000 for a major version and 10 for a minor one.
std::string cufile_version_text(int32_t version);

}  // namespace flexkv
