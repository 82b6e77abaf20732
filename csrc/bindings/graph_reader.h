// Reads graphs that Python code submits. An op is any object with the fields of TransferOp in
// flexkv/transfer/graph.py; an edge is any object with the fields of Edge in the same file.
#pragma once
#include <pybind11/pybind11.h>

#include "transfer/op.h"

namespace flexkv {

// Returns the graph of these ops and edges. Throws ContractError if a field is missing or has the wrong type;
// the error message names the field.
GraphSpec read_graph(const pybind11::sequence& ops, const pybind11::sequence& edges);

}  // namespace flexkv
