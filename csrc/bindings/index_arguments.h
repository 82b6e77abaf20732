// The types of the arrays that the block index and lookups take and return, and the checks of such arguments.
#pragma once
#include <pybind11/numpy.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "bindings/aligned_array.h"
#include "index/block_key.h"
#include "index/entry.h"

namespace flexkv {

using Bytes = pybind11::array_t<uint8_t, pybind11::array::c_style>;
using Entries = pybind11::array_t<EntryId, pybind11::array::c_style>;
using Slots = pybind11::array_t<int32_t, pybind11::array::c_style>;

inline std::span<const BlockKey> keys_of(const pybind11::array& keys) {
  if (!pybind11::isinstance<pybind11::array_t<uint8_t>>(keys) || keys.ndim() != 2 ||
      keys.shape(1) != kKeyBytes || !(keys.flags() & pybind11::array::c_style)) {
    throw KeySchemeError("block keys are " + pybind11::str(keys.dtype()).cast<std::string>() + " of " +
                         std::to_string(keys.ndim()) +
                         " dimensions; needed is a C-contiguous uint8 array of shape [blocks, 16]");
  }
  // Views of key chains, and arrays that NumPy allocated, are aligned. An array over other memory may be
  // unaligned.
  if (reinterpret_cast<uintptr_t>(keys.data()) % alignof(BlockKey) != 0) {
    throw KeySchemeError("block keys do not lie on an 8-byte boundary");
  }
  return {static_cast<const BlockKey*>(keys.data()), static_cast<size_t>(keys.shape(0))};
}

inline std::span<const EntryId> entries_of(const Entries& entries) {
  if (entries.ndim() != 1) throw ContractError("entries must have one dimension");
  require_aligned<ContractError>(entries, "entries");
  return {entries.data(), static_cast<size_t>(entries.shape(0))};
}

}  // namespace flexkv
