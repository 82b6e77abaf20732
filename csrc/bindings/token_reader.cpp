#include "bindings/token_reader.h"

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"
#include "bindings/text.h"

namespace py = pybind11;

namespace flexkv {
namespace {

constexpr const char* kAllowed = "; allowed are integers from 0 to 2**32 - 1";
constexpr Py_ssize_t kShownTokenCharacters = 80;
// Unit: tokens per call. The maximum length of an array of tokens. It is about a hundred times the longest
// context in use. A longer array is a mistake, for example one number that was broadcast to many elements.
// Such an array is rejected before memory is allocated.
constexpr size_t kMostTokensInCall = size_t{1} << 27;

[[noreturn]] void refuse(size_t position, py::handle value) {
  throw TokenError("token " + std::to_string(position) + " is " + shown(value, kShownTokenCharacters) + " (" +
                   Py_TYPE(value.ptr())->tp_name + ")" + kAllowed);
}

uint32_t token_from_int(size_t position, py::handle value, PyObject* integer) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(integer, &overflow);
  if (number == -1 && PyErr_Occurred()) PyErr_Clear();
  if (overflow != 0 || number < 0 || number > UINT32_MAX) refuse(position, value);
  return static_cast<uint32_t>(number);
}

uint32_t token_from_object(size_t position, PyObject* value) {
  if (PyBool_Check(value) || !PyIndex_Check(value)) refuse(position, value);
  const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(value));
  if (!integer) {
    PyErr_Clear();
    refuse(position, value);
  }
  return token_from_int(position, value, integer.ptr());
}

template <class T>
std::vector<uint32_t> read_array(const py::array& array, size_t begin, size_t count) {
  const auto* first = static_cast<const std::byte*>(array.data());
  const py::ssize_t stride = array.strides(0);
  std::vector<uint32_t> out(count);
  for (size_t i = 0; i < count; ++i) {
    T value;  // a copy, because the array may be unaligned
    std::memcpy(&value, first + static_cast<py::ssize_t>(begin + i) * stride, sizeof(value));
    bool fits = value <= static_cast<T>(UINT32_MAX) || sizeof(T) <= 4;
    if constexpr (std::is_signed_v<T>) fits = fits && value >= 0;
    if (!fits) refuse(begin + i, py::int_(value));
    out[i] = static_cast<uint32_t>(value);
  }
  return out;
}

std::vector<uint32_t> read_any_array(const py::array& array, size_t begin, size_t count) {
  if (py::isinstance<py::array_t<int64_t>>(array)) return read_array<int64_t>(array, begin, count);
  if (py::isinstance<py::array_t<int32_t>>(array)) return read_array<int32_t>(array, begin, count);
  if (py::isinstance<py::array_t<uint32_t>>(array)) return read_array<uint32_t>(array, begin, count);
  throw TokenError("tokens are an array of " + py::str(array.dtype()).cast<std::string>() +
                   "; allowed are int32, int64 and uint32");
}

size_t size_of(py::handle tokens) {
  if (PyList_Check(tokens.ptr()) || PyTuple_Check(tokens.ptr())) {
    return static_cast<size_t>(PySequence_Fast_GET_SIZE(tokens.ptr()));
  }
  if (py::isinstance<py::array>(tokens)) {
    const auto array = py::reinterpret_borrow<py::array>(tokens);
    if (array.ndim() == 1) return static_cast<size_t>(array.shape(0));
    throw TokenError("tokens are an array of " + std::to_string(array.ndim()) + " dimensions; allowed is 1");
  }
  throw TokenError(std::string("tokens are a ") + Py_TYPE(tokens.ptr())->tp_name +
                   "; allowed are a list, a tuple or a one-dimensional integer array");
}

}  // namespace

size_t token_count(py::handle tokens) {
  const size_t count = size_of(tokens);
  if (count > kMostTokensInCall) {
    throw TokenError("tokens are " + std::to_string(count) + "; allowed are up to " +
                     std::to_string(kMostTokensInCall) + " in one call");
  }
  return count;
}

std::vector<uint32_t> read_tokens(py::handle tokens, size_t begin, size_t count) {
  if (begin + count > token_count(tokens)) {
    throw TokenError("tokens " + std::to_string(begin) + " to " + std::to_string(begin + count) + " of " +
                     std::to_string(token_count(tokens)) + " were asked for");
  }
  if (py::isinstance<py::array>(tokens)) {
    return read_any_array(py::reinterpret_borrow<py::array>(tokens), begin, count);
  }
  std::vector<uint32_t> out(count);
  for (size_t i = 0; i < count; ++i) {
    // The size is checked again for every item, because an item's __index__ may run code that shortens the
    // list.
    if (begin + i >= static_cast<size_t>(PySequence_Fast_GET_SIZE(tokens.ptr()))) {
      throw TokenError("the token list became shorter while it was read");
    }
    PyObject* item = PySequence_Fast_GET_ITEM(tokens.ptr(), static_cast<py::ssize_t>(begin + i));
    if (PyLong_CheckExact(item)) {  // no Python code runs, so the item needs no reference of its own
      out[i] = token_from_int(begin + i, item, item);
    } else {
      out[i] = token_from_object(begin + i, py::reinterpret_borrow<py::object>(item).ptr());
    }
  }
  return out;
}

}  // namespace flexkv
