// Reads token ids from the lists and arrays that engines keep them in, without a detour through NumPy, which
// takes 3 ms for a list of 128k ints.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace flexkv {

// Number of tokens in a list, tuple or one-dimensional integer array. Throws TokenError for anything else,
// and for more than 2**27 tokens.
size_t token_count(pybind11::handle tokens);

// tokens[begin : begin + count] as u32. Throws TokenError naming position and value of the first that is not
// an integer (a bool is not) or lies outside [0, 2**32).
std::vector<uint32_t> read_tokens(pybind11::handle tokens, size_t begin, size_t count);

}  // namespace flexkv
