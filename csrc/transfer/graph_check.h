// What must hold of a graph before anything of it is queued. Each check throws and changes nothing.
#pragma once
#include <cstddef>
#include <string>

#include "transfer/attached_view.h"
#include "transfer/lane.h"
#include "transfer/op.h"

namespace flexkv {

// How errors name an op: by its id and its place in the graph.
std::string name_of(const OpSpec& op, size_t position);

// What one page of the op is, for one without a view. `view`: of its group, null where none is attached or
// the kind has no device side. `lane`: the one for its kind, null if there is none among those for `kinds`.
// Throws ContractError (kind, priority, group, lengths, a target that is named twice), BlockRangeError (block
// or slot), ClosedError (the host pool), and what the lane's check() throws.
PageSizes check_op(const OpSpec& op, size_t position, const AttachedView* view, const Lane* lane,
                   KindSet kinds);

// Throws ContractError for an edge that does not lead forward, is of no kind, or streams between ops with
// different numbers of pages.
void check_edges(const GraphSpec& graph);

// Throws ContractError for a gated graph with anything but layerwise D2H.
void check_gate(const GraphSpec& graph);

}  // namespace flexkv
