// The checks of a graph before any of its ops is queued. A check that fails throws; no check changes
// anything.
#pragma once
#include <cstddef>
#include <string>

#include "transfer/attached_view.h"
#include "transfer/lane.h"
#include "transfer/op.h"

namespace flexkv {

// Returns the text that identifies an op in an error message: its id and its position in the graph.
std::string name_of(const OpSpec& op, size_t position);

// Checks an op. Returns the sizes from the lane's check(). If the sizes follow from the view, does not call
// check() and returns default sizes. `view`: the view of the op's group; null if no view is attached or the
// kind has no device side. `lane`: the lane that serves the kind; null if the transfer engine has none.
// `kinds`: the kinds that the engine's lanes serve. Throws ContractError for an invalid kind, priority, group
// or length, or if a target occurs twice; BlockRangeError for an invalid block or slot; ClosedError if the
// host pool is closed; and what the lane's check() throws.
PageSizes check_op(const OpSpec& op, size_t position, const AttachedView* view, const Lane* lane,
                   KindSet kinds);

// Throws ContractError if an edge does not lead forward or has an unknown kind, or if a stream edge connects
// ops with different numbers of pages.
void check_edges(const GraphSpec& graph);

// Throws ContractError if a gated graph has an op other than a layerwise D2H.
void check_gate(const GraphSpec& graph);

}  // namespace flexkv
