// Binds functions that do the work of a GPU's threads on the CPU, one thread after another.
#include <pybind11/pybind11.h>

#include "bindings/rotation_arguments.h"
#include "testing/rotate_lanes.h"

namespace py = pybind11;

namespace flexkv {
namespace {

void rotate_rows(py::object src, py::object dst, py::object src_offsets, py::object dst_offsets,
                 py::object turn_of_row, py::object turns, const std::string& dtype,
                 const std::string& pairing, int32_t heads, int32_t head_dim, int32_t rotary_dim,
                 int64_t src_head_stride, int64_t dst_head_stride) {
  const Rotation given(std::move(src), std::move(dst), std::move(src_offsets), std::move(dst_offsets),
                       std::move(turn_of_row), std::move(turns), dtype, pairing, heads, head_dim, rotary_dim,
                       src_head_stride, dst_head_stride);
  if (!given.from.on_host()) throw GeometryError("src is on the GPU: the CPU reads host memory");
  given.require_tables(true, given.from);
  const py::gil_scoped_release release;
  given.check_rows();
  rotate_lane_by_lane(given.rows, given.type, given.pairing);
}

}  // namespace

void bind_lanes(py::module_& m) {
  m.def("rotate_rows", &rotate_rows, py::arg("src"), py::arg("dst"), py::arg("src_offsets"),
        py::arg("dst_offsets"), py::arg("turn_of_row"), py::arg("turns"), py::kw_only(), py::arg("dtype"),
        py::arg("pairing"), py::arg("heads"), py::arg("head_dim"), py::arg("rotary_dim"),
        py::arg("src_head_stride"), py::arg("dst_head_stride"));
}

}  // namespace flexkv
