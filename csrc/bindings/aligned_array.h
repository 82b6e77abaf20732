// Checks the alignment of NumPy arrays. If NumPy did not allocate an array's memory, the array may be
// unaligned, and pybind11 does not check this.
#pragma once
#include <pybind11/numpy.h>

#include <cstdint>
#include <string>

namespace flexkv {

// Throws E if the array's data is not aligned for T. `name`: the array's name in the error message.
template <typename E, typename T, int Flags>
void require_aligned(const pybind11::array_t<T, Flags>& array, const char* name) {
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T) == 0 || array.size() == 0) return;
  throw E(std::string(name) + " do not lie on a boundary of " + std::to_string(alignof(T)) + " bytes");
}

}  // namespace flexkv
