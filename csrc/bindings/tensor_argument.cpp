#include "bindings/tensor_argument.h"

#include <algorithm>

#include "base/error.h"
#include "bindings/text.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// The part of DLPack's ABI, version 0 (dmlc/dlpack), that this file reads.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
constexpr int32_t kDlCpu = 1;
constexpr int32_t kDlCudaHost = 3;
constexpr uint8_t kDlInt = 0;
constexpr int32_t kMostDimensions = 64;
constexpr Py_ssize_t kShownErrorCharacters = 200;
// Unit: bytes. The maximum size of a tensor. No machine has more memory.
constexpr int64_t kMostBytes = int64_t{1} << 56;

// Returns the tensor's DLPack capsule. If the tensor's library raises BufferError, throws GeometryError,
// which names the argument. NumPy raises BufferError for a read-only array. Other libraries raise it for
// tensors that they cannot share.
py::object capsule_of(const py::object& tensor, const std::string& name) {
  try {
    return tensor.attr("__dlpack__")();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_BufferError)) throw;
    throw GeometryError(name + " gives no DLPack: " + shown(error.value(), kShownErrorCharacters));
  }
}

// Returns the part of a dtype's name after the last dot: "int64" for "torch.int64" and for "int64".
std::string last_word(const std::string& dtype) {
  const size_t dot = dtype.rfind('.');
  return dot == std::string::npos ? dtype : dtype.substr(dot + 1);
}

}  // namespace

TensorArgument::TensorArgument(py::object object, std::string name)
    : object_(std::move(object)), name_(std::move(name)) {
  if (py::hasattr(object_, "data_ptr")) {
    take_pointer();
  } else if (py::hasattr(object_, "__dlpack__")) {
    take_dlpack();
  } else {
    throw GeometryError(name_ + " is a " + std::string(py::str(py::type::of(object_).attr("__name__"))) +
                        ": a tensor with data_ptr() or DLPack is needed");
  }
  check_extent();
}

void TensorArgument::check_extent() const {
  if (count_ < 0 || item_bytes_ < 1 || count_ > kMostBytes / item_bytes_) {
    throw GeometryError(name_ + " has " + std::to_string(count_) + " elements of " +
                        std::to_string(item_bytes_) + " bytes: that is no tensor");
  }
  if (data_ == nullptr && count_ > 0) throw GeometryError(name_ + " has the address 0");
}

void TensorArgument::take_pointer() try {
  if (!object_.attr("is_contiguous")().cast<bool>()) throw GeometryError(name_ + " is not contiguous");
  data_ = reinterpret_cast<void*>(object_.attr("data_ptr")().cast<uintptr_t>());
  count_ = object_.attr("numel")().cast<int64_t>();
  item_bytes_ = object_.attr("element_size")().cast<int64_t>();
  dtype_ = last_word(py::str(object_.attr("dtype")));
  on_host_ = std::string(py::str(object_.attr("device"))).rfind("cpu", 0) == 0;
} catch (const py::cast_error&) {
  throw GeometryError(name_ + " is no tensor: is_contiguous() must give a bool, data_ptr(), numel() and " +
                      "element_size() integers");
} catch (const py::error_already_set& error) {
  if (!error.matches(PyExc_AttributeError)) throw;
  throw GeometryError(name_ +
                      " has data_ptr() and is no tensor: " + shown(error.value(), kShownErrorCharacters));
}

void TensorArgument::take_dlpack() {
  py::object capsule = capsule_of(object_, name_);
  auto* tensor = static_cast<DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) throw py::error_already_set();
  if (tensor->ndim < 0 || tensor->ndim > kMostDimensions || (tensor->ndim > 0 && tensor->shape == nullptr)) {
    throw GeometryError(name_ + " has " + std::to_string(tensor->ndim) + " dimensions");
  }
  const std::span<const int64_t> shape(tensor->shape, static_cast<size_t>(tensor->ndim));
  const bool empty =
      std::find(shape.begin(), shape.end(), 0) != shape.end();  // an empty tensor's strides have no meaning
  count_ = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (!empty && tensor->strides != nullptr && shape[i] != 1 && tensor->strides[i] != count_) {
      throw GeometryError(name_ + " is not contiguous");
    }
    if (__builtin_mul_overflow(count_, shape[i], &count_)) throw GeometryError(name_ + " is too large");
  }
  data_ = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  item_bytes_ = std::max(1, tensor->type_bits * tensor->type_lanes / 8);
  dtype_ = (tensor->type_code == kDlInt && tensor->type_lanes == 1 ? "int" : "not an int of ") +
           std::to_string(tensor->type_bits);
  on_host_ = tensor->device_type == kDlCpu || tensor->device_type == kDlCudaHost;
  object_ = py::make_tuple(object_, capsule);  // the capsule frees its tensor when it is destroyed
}

void TensorArgument::require_aligned(size_t bytes) const {
  if (reinterpret_cast<uintptr_t>(data_) % bytes == 0) return;
  throw GeometryError(name_ + " does not lie on a boundary of " + std::to_string(bytes) + " bytes");
}

void TensorArgument::require_integers(const char* dtype, int64_t item_bytes) const {
  if (dtype_ != dtype || item_bytes_ != item_bytes)
    throw GeometryError(name_ + " has the dtype " + dtype_ + ": " + dtype + " is needed");
  if (!on_host_) throw GeometryError(name_ + " is in device memory: a tensor in host memory is needed");
}

}  // namespace flexkv
