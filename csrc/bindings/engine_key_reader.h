// Reads engine block keys from a sequence of bytes objects or a two-dimensional uint8 array.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <vector>

namespace flexkv {

// The keys [begin, end) of a sequence, borrowed: valid while the GIL is held and no Python code runs.
class EngineKeyReader {
 public:
  // Throws KeySchemeError for an item that is not a bytes object, or whose length no cryptographic hash has.
  EngineKeyReader(pybind11::handle keys, size_t begin, size_t end);

  // Number of keys in `keys`. Throws KeySchemeError when it is neither a list or tuple nor such an array.
  static size_t count(pybind11::handle keys);

  std::span<const std::span<const uint8_t>> keys() const { return keys_; }

 private:
  std::vector<std::span<const uint8_t>> keys_;
};

}  // namespace flexkv
