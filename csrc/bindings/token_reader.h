// Reads token ids directly from the lists and arrays in which engines keep them. Converting a list of 128k
// ints to NumPy first would take 3 ms.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace flexkv {

// Returns the number of tokens in a list, tuple or one-dimensional integer array. Throws TokenError if
// `tokens` is something else, or has more than 2**27 tokens.
size_t token_count(pybind11::handle tokens);

// Returns tokens[begin : begin + count]. Throws TokenError if a token is not an integer in [0, 2**32), or is
// a bool. The message gives the position and the value of the first such token.
std::vector<uint32_t> read_tokens(pybind11::handle tokens, size_t begin, size_t count);

}  // namespace flexkv
