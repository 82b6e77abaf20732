#include <pybind11/pybind11.h>

#include "bindings/bindings.h"

namespace flexkv {

void bind_layout(pybind11::module_&) {}

}  // namespace flexkv
