// Checks the alignment of NumPy arrays. An array over memory that NumPy did not allocate may be unaligned,
// and pybind11 does not check the alignment.
#pragma once
#include <pybind11/numpy.h>

#include <cstdint>
#include <string>

namespace flexkv {

// Throws E unless the array's data is aligned for T. The message calls the array `name`.
template <typename E, typename T, int Flags>
void require_aligned(const pybind11::array_t<T, Flags>& array, const char* name) {
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T) == 0 || array.size() == 0) return;
  throw E(std::string(name) + " do not lie on a boundary of " + std::to_string(alignof(T)) + " bytes");
}

}  // namespace flexkv
