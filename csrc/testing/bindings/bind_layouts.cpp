// Binds functions that return field offsets and constants from flexkv's declarations for the CUDA driver and
// cuFile. Tests compare these values with NVIDIA's own bindings.
#include <pybind11/pybind11.h>

#include <cstddef>

#include "cuda/driver.h"
#include "gds/cufile_shim.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// Adds a field to `layout`, which maps a field's name to its offset and size in bytes. The entry with the
// empty name is the complete structure.
#define FLEXKV_FIELD(type, field) layout[#field] = py::make_tuple(offsetof(type, field), sizeof(type::field))

py::dict whole(size_t bytes) {
  py::dict layout;
  layout[""] = py::make_tuple(0, bytes);
  return layout;
}

py::dict batch_attributes() {
  using cuda::BatchAttributes;
  py::dict layout = whole(sizeof(BatchAttributes));
  FLEXKV_FIELD(BatchAttributes, order);
  FLEXKV_FIELD(BatchAttributes, source_hint);
  FLEXKV_FIELD(BatchAttributes, destination_hint);
  FLEXKV_FIELD(BatchAttributes, flags);
  return layout;
}

py::dict file_description() {
  py::dict layout = whole(sizeof(CufileDescription));
  FLEXKV_FIELD(CufileDescription, type);
  FLEXKV_FIELD(CufileDescription, file);
  FLEXKV_FIELD(CufileDescription, file_system_ops);
  return layout;
}

#undef FLEXKV_FIELD

py::dict cuda_layouts() {
  py::dict all;
  all["BatchAttributes"] = batch_attributes();
  all["CufileDescription"] = file_description();
  return all;
}

// Returns the values of flexkv's constants for the CUDA driver, each under its name in cuda.h.
py::dict cuda_constants() {
  py::dict all;
  all["CU_STREAM_NON_BLOCKING"] = cuda::kStreamNonBlocking;
  all["CU_EVENT_BLOCKING_SYNC"] = cuda::kEventBlockingSync;
  all["CU_EVENT_DISABLE_TIMING"] = cuda::kEventDisableTiming;
  all["CU_MEMHOSTREGISTER_PORTABLE"] = cuda::kHostRegisterPortable;
  all["CU_MEMHOSTREGISTER_DEVICEMAP"] = cuda::kHostRegisterDeviceMap;
  all["CU_MEMHOSTALLOC_PORTABLE"] = cuda::kHostAllocPortable;
  all["CU_MEMHOSTALLOC_DEVICEMAP"] = cuda::kHostAllocDeviceMap;
  all["CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"] = cuda::kAttributeMultiprocessors;
  all["CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"] =
      cuda::kAttributeHostPointerIsDevicePointer;
  all["CU_MEMORYTYPE_HOST"] = cuda::kMemoryTypeHost;
  all["CU_MEMORYTYPE_DEVICE"] = cuda::kMemoryTypeDevice;
  all["CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"] = static_cast<int>(cuda::SourceOrder::kStream);
  all["CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL"] = static_cast<int>(cuda::SourceOrder::kDuringApiCall);
  all["CU_MEMCPY_SRC_ACCESS_ORDER_ANY"] = static_cast<int>(cuda::SourceOrder::kAny);
  all["CU_STREAM_CAPTURE_MODE_GLOBAL"] = cuda::kCaptureGlobal;
  all["CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"] = cuda::kCaptureThreadLocal;
  all["CU_STREAM_CAPTURE_MODE_RELAXED"] = cuda::kCaptureRelaxed;
  all["CU_STREAM_CAPTURE_STATUS_NONE"] = cuda::kNotCapturing;
  all["CU_POINTER_ATTRIBUTE_MEMORY_TYPE"] = cuda::kPointerMemoryType;
  all["CUDA_ERROR_INVALID_VALUE"] = cuda::kErrorInvalidValue;
  all["CUDA_SUCCESS"] = cuda::kSuccess;
  all["CUDA_ERROR_NOT_READY"] = cuda::kErrorNotReady;
  return all;
}

}  // namespace

void bind_layouts(py::module_& m) {
  m.def("cuda_layouts", &cuda_layouts);
  m.def("cuda_constants", &cuda_constants);
}

}  // namespace flexkv
