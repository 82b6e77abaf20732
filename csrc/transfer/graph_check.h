// Checks a graph before any of it is queued. A check that fails throws and changes nothing.
#pragma once
#include <cstddef>
#include <string>

#include "transfer/attached_view.h"
#include "transfer/lane.h"
#include "transfer/op.h"

namespace flexkv {

// Names an op in an error, by its id and its position in the graph.
std::string name_of(const OpSpec& op, size_t position);

// Checks an op, and returns the sizes of its pages if it has no view. `view`: the view of its group; null if
// none is attached or the kind has no device side. `lane`: the lane that serves its kind; null if the engine
// has none. `kinds`: the kinds that the engine's lanes serve. Throws ContractError (kind, priority, group,
// lengths, a target that is named twice), BlockRangeError (block or slot), ClosedError (the host pool), and
// what the lane's check() throws.
PageSizes check_op(const OpSpec& op, size_t position, const AttachedView* view, const Lane* lane,
                   KindSet kinds);

// Throws ContractError for an edge that does not lead forward, has an unknown kind, or streams between ops
// with different numbers of pages.
void check_edges(const GraphSpec& graph);

// Throws ContractError if a gated graph has an op other than a layerwise D2H.
void check_gate(const GraphSpec& graph);

}  // namespace flexkv
