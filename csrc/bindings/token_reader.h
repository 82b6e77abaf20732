// Reads token ids directly from the lists and arrays of inference engines. If a list of 128k ints were first
// converted to a NumPy array, that alone would take 3 ms.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace flexkv {

// Returns the number of tokens in a list, tuple or one-dimensional integer array. Throws TokenError if
// `tokens` is none of these, or has more than 2**27 tokens.
size_t token_count(pybind11::handle tokens);

// Returns tokens[begin : begin + count]. Throws TokenError if a token is a bool or is not an integer in [0,
// 2**32). The error message has the position and the value of the first such token.
std::vector<uint32_t> read_tokens(pybind11::handle tokens, size_t begin, size_t count);

}  // namespace flexkv
