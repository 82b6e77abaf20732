// Translates the native exception family to the classes of flexkv/errors.py.
#pragma once
#include <pybind11/pybind11.h>

namespace flexkv {

// Looks the classes up in flexkv.errors (which must be importable) and registers the translator for this
// module.
void bind_errors(pybind11::module_& m);

}  // namespace flexkv
