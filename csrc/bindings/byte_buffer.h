// The bytes of a C-contiguous Python buffer of any item type. A ByteBuffer object keeps the Python buffer
// exported until the object is destroyed.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>

#include "base/error.h"

namespace flexkv {

class ByteBuffer {
 public:
  enum Access { kReadable = 0, kWritable = PyBUF_WRITABLE };

  // Throws GeometryError if `object` has no contiguous buffer, or if `access` is kWritable and the buffer is
  // read-only. Construct and destroy a ByteBuffer with the GIL held; data() may be used without the GIL.
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
