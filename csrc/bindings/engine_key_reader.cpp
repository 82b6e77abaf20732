#include "bindings/engine_key_reader.h"

#include <pybind11/numpy.h>

#include <string>

#include "base/error.h"
#include "index/key_hasher.h"

namespace py = pybind11;

namespace flexkv {
namespace {

constexpr const char* kHint =
    ". In vLLM set --prefix-caching-hash-algo sha256 (or sha256_cbor, stable over Python versions)";

std::string type_name(py::handle value) { return Py_TYPE(value.ptr())->tp_name; }

}  // namespace

size_t EngineKeyReader::count(py::handle keys) {
  if (PyList_Check(keys.ptr()) || PyTuple_Check(keys.ptr())) {
    return static_cast<size_t>(PySequence_Fast_GET_SIZE(keys.ptr()));
  }
  if (py::isinstance<py::array_t<uint8_t>>(keys)) {
    const auto array = py::reinterpret_borrow<py::array>(keys);
    if (array.ndim() == 2 && (array.flags() & py::array::c_style)) return static_cast<size_t>(array.shape(0));
  }
  throw KeySchemeError(
      "engine block keys are a " + type_name(keys) +
      "; allowed are a list or tuple of bytes, or a C-contiguous uint8 array of shape [keys, bytes]");
}

EngineKeyReader::EngineKeyReader(py::handle keys, size_t begin, size_t end) {
  if (begin >= end) return;
  keys_.reserve(end - begin);
  if (py::isinstance<py::array>(keys)) {
    const auto array = py::reinterpret_borrow<py::array_t<uint8_t>>(keys);
    const auto bytes = static_cast<size_t>(array.shape(1));
    check_engine_key_bytes(bytes, begin);
    for (size_t i = begin; i < end; ++i) keys_.emplace_back(array.data() + i * bytes, bytes);
    return;
  }
  for (size_t i = begin; i < end; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(keys.ptr(), static_cast<py::ssize_t>(i));
    if (!PyBytes_Check(item)) {
      throw KeySchemeError("engine block key " + std::to_string(i) + " is a " + type_name(item) +
                           "; allowed are bytes of a cryptographic hash" + kHint);
    }
    const auto bytes = static_cast<size_t>(PyBytes_GET_SIZE(item));
    check_engine_key_bytes(bytes, i);
    keys_.emplace_back(reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(item)), bytes);
  }
}

}  // namespace flexkv
