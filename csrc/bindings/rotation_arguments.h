// Reads the arguments of a rotation of keys from Python, checks them, and converts them to the types of
// rope/rotate.h.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/tensor_argument.h"
#include "rope/rotation_check.h"

namespace flexkv {

inline ElementType element_type(const std::string& name) {
  if (name == "float32") return ElementType::kFloat32;
  if (name == "bfloat16") return ElementType::kBfloat16;
  if (name == "float16") return ElementType::kFloat16;
  throw GeometryError("keys of dtype " + name + ": allowed are float32, bfloat16 and float16");
}

inline Pairing pairing_of(const std::string& name) {
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
  argument.require_aligned(alignof(T));
  return static_cast<const T*>(argument.data());
}

// The arguments of a rotation, and the tensors that own the arguments' memory.
struct Rotation {
  TensorArgument from, to, from_at, to_at, which, turns;
  RotationRows rows;
  ElementType type;
  Pairing pairing;
  int64_t turn_count;

  Rotation(pybind11::object src, pybind11::object dst, pybind11::object src_offsets,
           pybind11::object dst_offsets, pybind11::object turn_of_row, pybind11::object turn_table,
           const std::string& dtype, const std::string& pairing_name, int32_t heads, int32_t head_dim,
           int32_t rotary_dim, int64_t src_head_stride, int64_t dst_head_stride)
      : from(std::move(src), "src"),
        to(std::move(dst), "dst"),
        from_at(std::move(src_offsets), "src_offsets"),
        to_at(std::move(dst_offsets), "dst_offsets"),
        which(std::move(turn_of_row), "turn_of_row"),
        turns(std::move(turn_table), "turns"),
        type(element_type(dtype)),
        pairing(pairing_of(pairing_name)) {
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
    turn_count = turns.bytes() / turn_bytes;
    rows.turns = table<float>(turns, turn_count * rotary_dim);
    if (to.on_host() != from.on_host()) differ(to, from);
  }

  // If `on_host` is true, all tables must be in host memory, otherwise on the GPU. Throws GeometryError if a
  // table is not. The error message names the table, and says that it must be in the same memory as `like`.
  void require_tables(bool on_host, const TensorArgument& like) const {
    for (const TensorArgument* argument : {&turns, &from_at, &to_at, &which}) {
      if (argument->on_host() != on_host) differ(*argument, like);
    }
  }

  void check_rows() const { check_rotation_rows(rows, type, from.bytes(), to.bytes(), turn_count); }

 private:
  [[noreturn]] static void differ(const TensorArgument& one, const TensorArgument& other) {
    throw GeometryError(one.name() + " and " + other.name() +
                        " must both be in host memory or both on the GPU");
  }
};

}  // namespace flexkv
