// Puts a guard between Python and pybind11's dispatcher. The dispatcher is the C++ code that receives every
// call.
#pragma once
#include <pybind11/pybind11.h>

namespace flexkv {

// Guards all functions and members of `m`: a C++ exception that escapes pybind11 becomes a Python error. The
// guard is needed because pybind11's dispatcher puts keyword names into the message of a TypeError outside of
// any try block. Without the guard, a name that is not UTF-8 (`**{"\ud800": 1}`) would end the process. The
// module must call guard_calls() after it has bound all functions and classes.
void guard_calls(pybind11::module_& m);

}  // namespace flexkv
