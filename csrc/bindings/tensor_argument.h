// A function argument that is a tensor of any library. A tensor is an object that has a method data_ptr(), as
// a torch tensor has, or that supports DLPack.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace flexkv {

// Keeps the tensor object, and so the tensor's memory, alive. The GIL must be held when a TensorArgument is
// constructed or destroyed.
class TensorArgument {
 public:
  // Throws GeometryError, whose text names the argument, if `object` is not a contiguous tensor. Does not
  // check whether the address that the object reports is valid.
  TensorArgument(pybind11::object object, std::string name);

  void* data() const { return data_; }
  int64_t bytes() const { return count_ * item_bytes_; }
  bool on_host() const { return on_host_; }
  const std::string& name() const { return name_; }
  // Throws GeometryError if the tensor's address is not a multiple of `bytes`.
  void require_aligned(size_t bytes) const;

  // int32s() and int64s() return the elements of a tensor in host memory. They throw GeometryError if the
  // tensor has a different dtype, is in device memory or is not aligned.
  std::span<const int32_t> int32s() const { return elements<int32_t>("int32"); }
  std::span<const int64_t> int64s() const { return elements<int64_t>("int64"); }

 private:
  void take_pointer();
  void take_dlpack();
  void check_extent() const;
  void require_integers(const char* dtype, int64_t item_bytes) const;
  template <typename T>
  std::span<const T> elements(const char* dtype) const {
    require_integers(dtype, sizeof(T));
    require_aligned(alignof(T));
    return {static_cast<const T*>(data_), static_cast<size_t>(count_)};
  }

  pybind11::object object_;
  std::string name_;
  void* data_ = nullptr;
  int64_t count_ = 0;
  int64_t item_bytes_ = 1;
  std::string dtype_;
  bool on_host_ = true;
};

}  // namespace flexkv
