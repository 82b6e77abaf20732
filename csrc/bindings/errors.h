// Translates the native core's C++ exceptions to the exception classes of flexkv/errors.py.
#pragma once
#include <pybind11/pybind11.h>

namespace flexkv {

// Looks up the classes in flexkv.errors, which must be importable, and registers the translator for this
// module.
void bind_errors(pybind11::module_& m);

}  // namespace flexkv
