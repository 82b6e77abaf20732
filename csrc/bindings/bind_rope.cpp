// Rotations of keys for Python. Tensors in; no logic.
#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/tensor_argument.h"
#include "rope/rotate.h"
#include "rope/rotation_check.h"

namespace py = pybind11;

namespace flexkv {
namespace {

ElementType element_type(const std::string& name) {
  if (name == "float32") return ElementType::kFloat32;
  if (name == "bfloat16") return ElementType::kBfloat16;
  if (name == "float16") return ElementType::kFloat16;
  throw GeometryError("keys of dtype " + name + ": allowed are float32, bfloat16 and float16");
}

Pairing pairing_of(const std::string& name) {
  if (name == "neox") return Pairing::kNeox;
  if (name == "gptj") return Pairing::kGptj;
  throw GeometryError("pairing " + name + ": allowed are neox and gptj");
}

template <typename T>
const T* table(const TensorArgument& argument, int64_t rows) {
  if (argument.bytes() != rows * static_cast<int64_t>(sizeof(T))) {
    throw GeometryError(argument.name() + " has " + std::to_string(argument.bytes()) + " bytes: " +
                        std::to_string(rows) + " rows of " + std::to_string(sizeof(T)) + " are needed");
  }
  return static_cast<const T*>(argument.data());
}

void rotate_rows(py::object src, py::object dst, py::object src_offsets, py::object dst_offsets,
                 py::object turn_of_row, py::object turns, const std::string& dtype,
                 const std::string& pairing, int32_t heads, int32_t head_dim, int32_t rotary_dim,
                 int64_t src_head_stride, int64_t dst_head_stride, bool lane_by_lane, uintptr_t stream) {
  const TensorArgument from(std::move(src), "src"), to(std::move(dst), "dst"), turn_table(turns, "turns");
  const TensorArgument from_at(src_offsets, "src_offsets"), to_at(dst_offsets, "dst_offsets");
  const TensorArgument which(turn_of_row, "turn_of_row");
  const ElementType type = element_type(dtype);
  RotationRows rows;
  rows.src = static_cast<const unsigned char*>(from.data());
  rows.dst = static_cast<unsigned char*>(to.data());
  rows.src_head_stride = src_head_stride;
  rows.dst_head_stride = dst_head_stride;
  rows.rows = which.bytes() / static_cast<int64_t>(sizeof(int32_t));
  rows.heads = heads;
  rows.head_dim = head_dim;
  rows.rotary_dim = rotary_dim;
  check_rotation_shape(rows, type);
  rows.src_offsets = table<int64_t>(from_at, rows.rows);
  rows.dst_offsets = table<int64_t>(to_at, rows.rows);
  rows.turn_of_row = table<int32_t>(which, rows.rows);
  const int64_t turn_bytes = static_cast<int64_t>(sizeof(float)) * rotary_dim;
  rows.turns = table<float>(turn_table, turn_table.bytes() / turn_bytes * rotary_dim);
  for (const TensorArgument* argument : {&to, &turn_table, &from_at, &to_at, &which}) {
    if (argument->on_host() != from.on_host()) {
      throw GeometryError(argument->name() + " and src must both be in host memory or both on the GPU");
    }
  }
  std::string error;
  {
    const py::gil_scoped_release release;
    if (!from.on_host()) {
      error = rotate_on_gpu(rows, type, pairing_of(pairing), stream);
    } else {
      check_rotation_rows(rows, type, from.bytes(), to.bytes(), turn_table.bytes() / turn_bytes);
      (lane_by_lane ? rotate_lane_by_lane : rotate_on_host)(rows, type, pairing_of(pairing));
    }
  }
  if (!error.empty()) throw TransferError(error);
}

}  // namespace

void bind_rope(py::module_& m) {
  m.def("rotate_rows", &rotate_rows, py::arg("src"), py::arg("dst"), py::arg("src_offsets"),
        py::arg("dst_offsets"), py::arg("turn_of_row"), py::arg("turns"), py::kw_only(), py::arg("dtype"),
        py::arg("pairing"), py::arg("heads"), py::arg("head_dim"), py::arg("rotary_dim"),
        py::arg("src_head_stride"), py::arg("dst_head_stride"), py::arg("lane_by_lane") = false,
        py::arg("stream") = 0);
}

}  // namespace flexkv
