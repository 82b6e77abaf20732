// A guard between Python and pybind11's own dispatcher.
#pragma once
#include <pybind11/pybind11.h>

namespace flexkv {

// After this call, no C++ exception leaves a function or member of `m`: one that escapes pybind11 becomes a
// Python error. pybind11's dispatcher puts the names of keywords into the message of a TypeError outside of
// any try block, so a name that is not UTF-8 (`**{"\ud800": 1}`) would end the process. Call it once
// everything is bound.
void guard_calls(pybind11::module_& m);

}  // namespace flexkv
