// Reads engine block keys from a sequence of bytes objects or a two-dimensional uint8 array.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <vector>

namespace flexkv {

// Gives access to the keys [begin, end) of a sequence. The reader does not own the keys, so it is valid only
// as long as the caller holds the GIL and no Python code runs.
class EngineKeyReader {
 public:
  // Throws KeySchemeError if an item is not a bytes object, or does not have 16 to 64 bytes, as cryptographic
  // hashes have.
  EngineKeyReader(pybind11::handle keys, size_t begin, size_t end);

  // Returns the number of keys in `keys`. Throws KeySchemeError if `keys` is neither a list, a tuple nor a
  // two-dimensional C-contiguous uint8 array.
  static size_t count(pybind11::handle keys);

  std::span<const std::span<const uint8_t>> keys() const { return keys_; }

 private:
  std::vector<std::span<const uint8_t>> keys_;
};

}  // namespace flexkv
