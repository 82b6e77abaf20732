// Decodes text from the native core for Python. The text, for example a file name or an error message, may
// have bytes that are not UTF-8. These must not cause a UnicodeDecodeError.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

namespace flexkv {

// Decodes UTF-8 and replaces invalid bytes. Returns a new reference, or null with a Python error set.
inline PyObject* decode_text(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

inline pybind11::str to_text(const std::string& text) {
  PyObject* decoded = decode_text(text);
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

// Decodes a path in the same way as Python's os functions. So bytes that are not UTF-8 are preserved when
// Python encodes the path again.
inline pybind11::str to_path(const std::string& path) {
  PyObject* decoded = PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

// Returns the repr of a Python object for an error message, shortened to `most` characters.
inline std::string shown(pybind11::handle object, Py_ssize_t most) {
  const pybind11::str whole = pybind11::repr(object);
  const Py_ssize_t length = PyUnicode_GetLength(whole.ptr());
  const auto cut = pybind11::reinterpret_steal<pybind11::object>(
      PyUnicode_Substring(whole.ptr(), 0, length < most ? length : most));
  if (!cut) throw pybind11::error_already_set();
  const auto bytes = pybind11::reinterpret_steal<pybind11::bytes>(
      PyUnicode_AsEncodedString(cut.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw pybind11::error_already_set();
  return std::string(bytes) + (length > most ? "..." : "");
}

}  // namespace flexkv
