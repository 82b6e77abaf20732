// The module tests.testing_ext, which only tests use: decorators and helpers for the native core's objects.
#include <pybind11/pybind11.h>

#include "bindings/call_guard.h"
#include "bindings/errors.h"

namespace py = pybind11;

namespace flexkv {

void bind_fake_gpu(py::module_& m);
void bind_io_faults(py::module_& m);
void bind_lanes(py::module_& m);
void bind_layouts(py::module_& m);
void bind_movers(py::module_& m);

}  // namespace flexkv

PYBIND11_MODULE(testing_ext, m) {
  m.doc() = "Faults, counts, a GPU's threads on the CPU and a fake GPU, around objects of flexkv.c_ext.";
  py::module_::import("flexkv.c_ext");  // needed because it defines base classes of this module's classes
  flexkv::bind_errors(m);
  flexkv::bind_movers(m);
  flexkv::bind_io_faults(m);
  flexkv::bind_lanes(m);
  flexkv::bind_layouts(m);
  flexkv::bind_fake_gpu(m);
  flexkv::guard_calls(m);
}
