// The CUDA driver's functions, found at run time: libcuda is loaded if the machine has it, and never linked.
// The declarations are flexkv's own, so that a build needs no CUDA toolkit. They have the same binary form as
// the declarations in cuda.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv::cuda {

using Code = int;  // CUresult
inline constexpr Code kSuccess = 0;
inline constexpr Code kErrorInvalidValue = 1;
inline constexpr Code kErrorNotReady = 600;
// The legacy stream was used while another stream is being captured.
inline constexpr Code kErrorCaptureImplicit = 906;

// Values of CUstreamCaptureMode. Every thread starts in global mode. While one thread captures a graph in
// global mode, any potentially unsafe call by another thread in global mode fails and invalidates the
// capture.
inline constexpr int kCaptureGlobal = 0;
inline constexpr int kCaptureThreadLocal = 1;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kNotCapturing = 0;  // a value of CUstreamCaptureStatus

using DeviceNumber = int;
using ContextHandle = struct CUctx_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using DeviceAddress = unsigned long long;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kWriteValueDefault = 0;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocDeviceMap = 2;
inline constexpr int kAttributeMultiprocessors = 16;
inline constexpr int kAttributeHostPointerIsDevicePointer = 91;
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr int kPointerMemoryType = 2;   // a CUpointer_attribute, whose value is a CUmemorytype
inline constexpr uintptr_t kLegacyStream = 1;  // CU_STREAM_LEGACY; 0 may mean a per-thread stream

struct Uuid {  // CUuuid
  char bytes[16] = {};
};

struct MemoryLocation {
  int type = 0;
  int id = 0;
};

// Says when the driver may read the source of a batched copy.
enum class SourceOrder : int {
  kStream = 1,         // after the work that precedes the copy in the stream
  kDuringApiCall = 2,  // before the driver call returns
  kAny = 3,            // any time before the copy ends; the source must already be complete
};

struct BatchAttributes {  // CUmemcpyAttributes_v1
  SourceOrder order = SourceOrder::kStream;
  MemoryLocation source_hint;
  MemoryLocation destination_hint;
  unsigned flags = 0;
};
static_assert(sizeof(BatchAttributes) == 24);

// cuMemcpyBatchAsync of CUDA 12.8 has a parameter that reports which copy failed. The function of CUDA 13.0
// has the same name, but not this parameter.
using BatchCopy12080 = Code (*)(DeviceAddress* dsts, DeviceAddress* srcs, size_t* sizes, size_t count,
                                BatchAttributes* attributes, size_t* attribute_indices,
                                size_t attribute_count, size_t* failed_index, StreamHandle stream);
using BatchCopy13000 = Code (*)(DeviceAddress* dsts, DeviceAddress* srcs, size_t* sizes, size_t count,
                                BatchAttributes* attributes, size_t* attribute_indices,
                                size_t attribute_count, StreamHandle stream);

// The type of cuGetProcAddress_v2, a function that returns the address of a driver function.
using FindFunction = Code (*)(const char* name, void** function, int cuda_version, uint64_t flags,
                              int* status);

// The driver's functions that flexkv calls. Only pointers with a comment may be null.
struct Driver {
  int version = 0;  // in CUDA's notation: 13000 is 13.0

  Code (*get_error_string)(Code, const char**) = nullptr;
  Code (*init)(unsigned flags) = nullptr;
  Code (*driver_get_version)(int*) = nullptr;
  Code (*device_get_count)(int*) = nullptr;
  Code (*device_get)(DeviceNumber*, int ordinal) = nullptr;
  Code (*device_get_name)(char*, int bytes, DeviceNumber) = nullptr;
  Code (*device_get_pci)(char*, int bytes, DeviceNumber) = nullptr;
  Code (*device_get_uuid)(Uuid*, DeviceNumber) = nullptr;
  Code (*device_total_mem)(size_t*, DeviceNumber) = nullptr;
  Code (*device_get_attribute)(int*, int attribute, DeviceNumber) = nullptr;
  Code (*primary_context_retain)(ContextHandle*, DeviceNumber) = nullptr;
  Code (*primary_context_release)(DeviceNumber) = nullptr;
  Code (*context_push)(ContextHandle) = nullptr;
  Code (*context_pop)(ContextHandle*) = nullptr;
  Code (*context_set)(ContextHandle) = nullptr;
  Code (*context_get_device)(DeviceNumber*) = nullptr;
  Code (*exchange_capture_mode)(int* mode) = nullptr;
  Code (*stream_is_capturing)(StreamHandle, int* status) = nullptr;
  Code (*stream_create)(StreamHandle*, unsigned flags, int priority) = nullptr;
  Code (*stream_priority_range)(int* least, int* greatest) = nullptr;
  Code (*stream_query)(StreamHandle) = nullptr;
  Code (*stream_write_value)(StreamHandle, DeviceAddress, uint32_t value, unsigned flags) = nullptr;
  Code (*stream_destroy)(StreamHandle) = nullptr;
  Code (*stream_synchronize)(StreamHandle) = nullptr;
  Code (*stream_wait_event)(StreamHandle, EventHandle, unsigned flags) = nullptr;
  Code (*event_create)(EventHandle*, unsigned flags) = nullptr;
  Code (*event_record)(EventHandle, StreamHandle) = nullptr;
  Code (*event_query)(EventHandle) = nullptr;
  Code (*event_synchronize)(EventHandle) = nullptr;
  Code (*event_destroy)(EventHandle) = nullptr;
  Code (*host_register)(void*, size_t, unsigned flags) = nullptr;
  Code (*host_unregister)(void*) = nullptr;
  Code (*host_alloc)(void**, size_t, unsigned flags) = nullptr;
  Code (*host_free)(void*) = nullptr;
  Code (*mem_alloc)(DeviceAddress*, size_t) = nullptr;
  Code (*mem_free)(DeviceAddress) = nullptr;
  Code (*copy_to_device)(DeviceAddress, const void*, size_t, StreamHandle) = nullptr;
  Code (*copy_to_host)(void*, DeviceAddress, size_t, StreamHandle) = nullptr;
  Code (*copy_any)(DeviceAddress, DeviceAddress, size_t, StreamHandle) = nullptr;
  Code (*memset_bytes)(DeviceAddress, unsigned char, size_t, StreamHandle) = nullptr;
  Code (*pointer_attribute)(void*, int attribute, DeviceAddress) = nullptr;
  BatchCopy12080 batch_12080 = nullptr;  // null unless 12.8 <= the driver's version < 13.0
  BatchCopy13000 batch_13000 = nullptr;  // null unless the driver's version is at least 13.0

  bool has_batch() const { return batch_12080 != nullptr || batch_13000 != nullptr; }
  // Returns an error message: `what`, a colon, and the driver's description of `code`.
  std::string error_text(Code code, const char* what) const;
  // Returns error_text() if `code` is an error, and an empty text if it is kSuccess.
  std::string failure(Code code, const char* what) const {
    return code == kSuccess ? std::string() : error_text(code, what);
  }
};

struct LoadedDriver {
  Driver driver;
  std::string missing;  // why the driver cannot be used; empty if it can
};

// Fills the table with the functions that `find` returns, and initialises the driver.
LoadedDriver find_functions(FindFunction find);

// Returns the driver of this machine. The first call loads and initialises it. If there is no driver, returns
// null and sets `*missing` to the reason. Do not call this function before the driver is needed: an
// initialised driver does not survive a fork.
const Driver* system_driver(std::string* missing = nullptr);

}  // namespace flexkv::cuda
