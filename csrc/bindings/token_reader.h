// Reads token ids directly from the lists and arrays in which engines keep them: converting a list of 128k
// ints to NumPy first would take 3 ms.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace flexkv {

// The number of tokens in a list, tuple or one-dimensional integer array. Throws TokenError for any other
// object, and for more than 2**27 tokens.
size_t token_count(pybind11::handle tokens);

// Returns tokens[begin : begin + count] as u32. Throws TokenError, naming its position and value, for the
// first token that is not an integer (a bool does not count as one) or lies outside [0, 2**32).
std::vector<uint32_t> read_tokens(pybind11::handle tokens, size_t begin, size_t count);

}  // namespace flexkv
