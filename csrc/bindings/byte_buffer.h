// A C-contiguous Python buffer of any item type, as bytes, held for as long as this object lives.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>

#include "base/error.h"

namespace flexkv {

class ByteBuffer {
 public:
  enum Access { kReadable = 0, kWritable = PyBUF_WRITABLE };

  // Throws GeometryError if the object has no contiguous buffer, or has only a read-only one and kWritable is
  // requested. Make and destroy it with the GIL held; data() may be used without it.
  ByteBuffer(const pybind11::buffer& object, Access access) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | access) != 0) {
      PyErr_Clear();
      throw GeometryError(access == kWritable ? "a writable C-contiguous buffer is needed"
                                              : "a C-contiguous buffer is needed");
    }
  }
  ~ByteBuffer() { PyBuffer_Release(&view_); }
  ByteBuffer(const ByteBuffer&) = delete;
  ByteBuffer& operator=(const ByteBuffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace flexkv
