// Binds the rotation of keys to new positions, and the checks of the rotation's arguments.
#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/rotation_arguments.h"
#include "rope/rotate.h"

namespace py = pybind11;

namespace flexkv {
namespace {

void rotate_rows(py::object src, py::object dst, py::object src_offsets, py::object dst_offsets,
                 py::object turn_of_row, py::object turns, const std::string& dtype,
                 const std::string& pairing, int32_t heads, int32_t head_dim, int32_t rotary_dim,
                 int64_t src_head_stride, int64_t dst_head_stride, uintptr_t stream) {
  const Rotation given(std::move(src), std::move(dst), std::move(src_offsets), std::move(dst_offsets),
                       std::move(turn_of_row), std::move(turns), dtype, pairing, heads, head_dim, rotary_dim,
                       src_head_stride, dst_head_stride);
  given.require_tables(given.from.on_host(), given.from);
  std::string error;
  {
    const py::gil_scoped_release release;
    if (!given.from.on_host()) {
      error = rotate_on_gpu(given.rows, given.type, given.pairing, stream);
    } else {
      given.check_rows();
      rotate_on_host(given.rows, given.type, given.pairing);
    }
  }
  if (!error.empty()) throw TransferError(error);
}

void check_rotation(py::object src, py::object dst, py::object src_offsets, py::object dst_offsets,
                    py::object turn_of_row, py::object turns, const std::string& dtype,
                    const std::string& pairing, int32_t heads, int32_t head_dim, int32_t rotary_dim,
                    int64_t src_head_stride, int64_t dst_head_stride) {
  const Rotation given(std::move(src), std::move(dst), std::move(src_offsets), std::move(dst_offsets),
                       std::move(turn_of_row), std::move(turns), dtype, pairing, heads, head_dim, rotary_dim,
                       src_head_stride, dst_head_stride);
  for (const TensorArgument* argument : {&given.turns, &given.from_at, &given.to_at, &given.which}) {
    if (!argument->on_host()) {
      throw GeometryError(argument->name() + " is on the GPU: tables are checked in host memory");
    }
  }
  const py::gil_scoped_release release;
  given.check_rows();
}

}  // namespace

void bind_rope(py::module_& m) {
  m.def("rotate_rows", &rotate_rows, py::arg("src"), py::arg("dst"), py::arg("src_offsets"),
        py::arg("dst_offsets"), py::arg("turn_of_row"), py::arg("turns"), py::kw_only(), py::arg("dtype"),
        py::arg("pairing"), py::arg("heads"), py::arg("head_dim"), py::arg("rotary_dim"),
        py::arg("src_head_stride"), py::arg("dst_head_stride"), py::arg("stream") = 0);
  m.def("check_rotation", &check_rotation, py::arg("src"), py::arg("dst"), py::arg("src_offsets"),
        py::arg("dst_offsets"), py::arg("turn_of_row"), py::arg("turns"), py::kw_only(), py::arg("dtype"),
        py::arg("pairing"), py::arg("heads"), py::arg("head_dim"), py::arg("rotary_dim"),
        py::arg("src_head_stride"), py::arg("dst_head_stride"));
}

}  // namespace flexkv
