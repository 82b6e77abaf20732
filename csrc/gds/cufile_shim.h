// cuFile's functions, loaded at run time. The declarations are ours, after the ABI of libcufile.so.0 (CUDA 12
// and 13): nothing of it is needed to build.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace flexkv {

struct CufileError {
  int32_t code = 0;       // CUfileOpError; 0 is success
  int32_t cuda_code = 0;  // CUresult
};

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
  uint32_t feature_flags;
  uint32_t max_device_cache_kib;
  uint32_t per_buffer_cache_kib;
  uint32_t max_device_pinned_kib;
  uint32_t max_batch_entries;
  uint32_t max_batch_timeout_ms;
  uint64_t reserved[32];  // newer libraries may write more than is declared here
};

// One entry a function; a test fills in its own.
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
};

// How cuFile reaches the disks on this machine.
enum class CufileMode {
  kDirect,  // GPUDirect Storage
  kCompat,  // POSIX calls and copies inside cuFile
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
  CufileMode mode() const { return mode_; }
  std::string describe() const;

 private:
  CufileTable table_;
  CufileMode mode_ = CufileMode::kCompat;
  bool opened_ = false;  // by us, and so ours to close
  std::string version_;
};

// One for the process, opened by the first call. Null without a GPU - cuFile is not even loaded then, because
// its driver may hang on opening - or where it cannot be had; `why` says which.
std::shared_ptr<Cufile> shared_cufile(int32_t gpu_count, std::string* why);

// "cuFile error 5011 (CUDA error 700)".
std::string to_string(const CufileError& error);

}  // namespace flexkv
