// cuFile's functions, which are loaded at run time. The declarations in this file follow the ABI of
// libcufile.so.0 (CUDA 12 and 13), so that flexkv can be built without cuFile.
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
    uint32_t status_flags;   // one bit for each kind of file system that GPUDirect Storage can serve
    uint32_t control_flags;  // bit 0: polling, bit 1: compatibility mode allowed
  } nvfs;
  uint32_t feature_flags;  // bit 4: PCI P2PDMA
  uint32_t max_device_cache_kib;
  uint32_t per_buffer_cache_kib;
  uint32_t max_device_pinned_kib;
  uint32_t max_batch_entries;
  uint32_t max_batch_timeout_ms;
  uint64_t reserved[32];  // space for further fields that newer libraries may write
};

// One pointer per function of cuFile; tests fill the table with functions of their own. If a comment names a
// version, older libraries do not have the function.
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
  CufileError (*set_max_pinned_kib)(size_t) = nullptr;                      // no effect after driver_open
  CufileError (*version)(int32_t*) = nullptr;                               // since 1.7
  CufileError (*p2p_flags)(int32_t file_system, int32_t* flags) = nullptr;  // since 1.16
  CufileStatisticsTable statistics;                                         // since 1.15
};

// cuFile with its driver open.
class Cufile {
 public:
  // Raises cuFile's limit on pinned device memory to `pinned_bytes`, if that is more than cuFile's default;
  // pinned_limit() returns the resulting limit. Then opens cuFile's driver with the functions of `table`, and
  // reads the driver's properties. Throws ConfigError, with the reason, if the driver cannot be opened or its
  // properties cannot be read.
  explicit Cufile(const CufileTable& table, int64_t pinned_bytes = 0);
  ~Cufile();
  Cufile(const Cufile&) = delete;
  Cufile& operator=(const Cufile&) = delete;

  const CufileTable& table() const { return table_; }
  // The mechanisms through which disks and GPUs can exchange bytes on this machine, such as "nvidia-fs 2.0"
  // or "PCI P2PDMA". Whether calls use one of these mechanisms differs from file to file. Empty in
  // compatibility mode, in which cuFile makes POSIX calls instead.
  const std::string& direct_by() const { return direct_by_; }
  // Unit: bytes. How much device memory cuFile can register in this process in total; 0 if cuFile does not
  // report it.
  int64_t pinned_limit() const { return pinned_limit_; }
  // Says why cuFile does not count the routes of its calls; empty if it counts them.
  const std::string& uncounted() const { return statistics_->refusal(); }
  CufileWatch& watch() { return *watch_; }

 private:
  CufileTable table_;
  bool opened_ = false;  // whether this object opened the driver and therefore closes it
  std::string direct_by_;
  int64_t pinned_limit_ = 0;
  std::unique_ptr<CufileStatistics> statistics_;
  std::unique_ptr<CufileWatch> watch_;
};

// Shares one open cuFile driver among all its users in the process. The driver stays open even when no user
// is left, because libcufile 1.15 crashes in one of its own threads after about two dozen cycles of opening
// and closing.
class CufileUsers {
 public:
  // Returns the open driver. The first call opens it: it passes the table that `load` returns, and
  // `pinned_bytes`, to Cufile's constructor. Returns null if `load` returns no table. Throws what Cufile's
  // constructor throws.
  std::shared_ptr<Cufile> join(const std::function<std::optional<CufileTable>()>& load,
                               int64_t pinned_bytes = 0);

 private:
  std::mutex mutex_;  // held while the driver opens
  std::shared_ptr<Cufile> cufile_;
};

// Unit: bytes. cuFile's default limit on the device memory that a process can pin
// (max_device_pinned_mem_size_kb in cufile.json).
inline constexpr int64_t kCufilePinnedBytes = int64_t{32} << 30;

inline constexpr const char* kCufileCompat = "cuFile in compatibility mode (no GPUDirect Storage)";

// Returns the process's cuFile, which the first call opens. Returns null, and sets `why` to the reason, if
// there is no GPU or cuFile cannot be opened. Without a GPU, this function does not even load cuFile, because
// opening cuFile's driver may hang. `pinned_bytes`: how much device memory the process may register; callers
// pass the size of all memory of the GPU.
std::shared_ptr<Cufile> shared_cufile(int32_t gpu_count, std::string* why, int64_t pinned_bytes = 0);

// Formats the number that cuFileGetVersion reports, which is 1000 * major + 10 * minor: 1200 becomes "1.20".
std::string cufile_version_text(int32_t version);

}  // namespace flexkv
