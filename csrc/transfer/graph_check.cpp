#include "transfer/graph_check.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/error.h"

namespace flexkv {
namespace {

// Throws BlockRangeError if any id is outside [low, high).
void check_range(const std::vector<int32_t>& ids, int64_t low, int64_t high, const char* what,
                 const OpSpec& op, size_t position, const std::string& note) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < low || id >= high; });
  if (bad == ids.end()) return;
  throw BlockRangeError(std::string(what) + " " + std::to_string(*bad) + " at page " +
                        std::to_string(bad - ids.begin()) + " of " + name_of(op, position) +
                        ": allowed are [" + std::to_string(low) + ", " + std::to_string(high) + ")" + note);
}

// Returns the ids of the blocks, slots or places that the op overwrites, and the word that error messages use
// for such an id ("block", "slot" or "place"). The pointer to the ids is null if the kind is invalid. No id
// may occur twice in an op, because two threads could copy to the same bytes.
std::pair<const std::vector<int32_t>*, const char*> targets(const OpSpec& op) {
  if (op.kind == OpKind::kH2D || op.kind == OpKind::kGdsRead) return {&op.blocks, "block"};
  if (op.kind == OpKind::kD2H || op.kind == OpKind::kDiskRead) return {&op.slots, "slot"};
  if (op.kind == OpKind::kDiskWrite || op.kind == OpKind::kGdsWrite || op.kind == OpKind::kDiskSeal) {
    return {&op.places, "place"};
  }
  return {nullptr, ""};
}

// Throws ContractError if an id occurs twice. Precondition: no id is negative.
void check_distinct(const std::vector<int32_t>& ids, const char* what, const OpSpec& op, size_t position) {
  // In most ops the ids are in ascending order. Then none occurs twice, and no table is needed.
  if (std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) == ids.end()) return;
  const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
  std::vector<bool> seen(static_cast<size_t>(*high - *low) + 1);
  for (const int32_t id : ids) {
    const auto at = static_cast<size_t>(id - *low);
    if (seen[at]) {
      throw ContractError(std::string(what) + " " + std::to_string(id) + " is a target of two pages of " +
                          name_of(op, position));
    }
    seen[at] = true;
  }
}

template <typename Enum>
bool in_range(Enum value, int count) {
  return static_cast<int>(value) >= 0 && static_cast<int>(value) < count;
}

}  // namespace

std::string name_of(const OpSpec& op, size_t position) {
  return "op " + std::to_string(op.op_id) + " (number " + std::to_string(position) + " of its graph)";
}

PageSizes check_op(const OpSpec& op, size_t position, const AttachedView* view, const Lane* lane,
                   KindSet kinds) {
  if (lane == nullptr) {
    throw ContractError(name_of(op, position) + ": no lane for " + to_string(op.kind) + " (" +
                        std::to_string(static_cast<int>(op.kind)) + "); this engine has " +
                        to_string_set(kinds));
  }
  if (!in_range(op.priority, kPriorities)) {
    throw ContractError(name_of(op, position) + ": priority " +
                        std::to_string(static_cast<int>(op.priority)) + ": must be in [0, " +
                        std::to_string(kPriorities) + ")");
  }
  if (view == nullptr && has_device_side(op.kind)) {
    throw ContractError(name_of(op, position) + ": group " + std::to_string(op.group) +
                        " has no view attached");
  }
  const char* counted = has_host_side(op.kind) ? " slots; " : " places; ";
  const size_t blocks = has_device_side(op.kind) ? op.pages() : 0;
  if (op.blocks.size() != blocks) {
    throw ContractError(name_of(op, position) + ": " + std::to_string(op.blocks.size()) + " blocks for " +
                        std::to_string(op.pages()) + counted + to_string(op.kind) + " needs " +
                        std::to_string(blocks));
  }
  const size_t slots_needed = has_host_side(op.kind) ? op.pages() : 0;
  const size_t places = has_places(op.kind) ? op.pages() : 0;
  if (op.slots.size() != slots_needed || op.places.size() != places || op.tags.size() != places * kTagBytes) {
    throw ContractError(name_of(op, position) + ": " + std::to_string(op.places.size()) + " places and " +
                        std::to_string(op.tags.size()) + " bytes of tags for " +
                        std::to_string(op.slots.size()) + " slots; " + to_string(op.kind) + " needs " +
                        std::to_string(places) + " and " + std::to_string(places * kTagBytes) + " for " +
                        std::to_string(slots_needed));
  }
  if (op.kind != OpKind::kDiskSeal && !op.digests.empty()) {
    throw ContractError(name_of(op, position) + ": digests are given to DISK_SEAL only");
  }
  if (!op.reads.empty() && (op.kind != OpKind::kH2D || op.reads.size() != op.pages())) {
    throw ContractError(name_of(op, position) + ": " + std::to_string(op.reads.size()) +
                        " reads to wait for; allowed are none, or with H2D one for each of the " +
                        std::to_string(op.pages()) + " pages");
  }
  for (const int64_t read : op.reads) {
    if (read >= 0 && read < kMostReads) continue;
    throw ContractError(name_of(op, position) + ": read " + std::to_string(read) +
                        " to wait for: must be in [0, " + std::to_string(kMostReads) + ")");
  }
  const auto [target_ids, target] = targets(op);
  const PageSizes sizes = has_places(op.kind) || !has_device_side(op.kind) ? lane->check(op) : PageSizes{};
  if (!has_device_side(op.kind)) {
    if (target_ids != nullptr) check_distinct(*target_ids, target, op, position);
    return sizes;
  }
  if (view->pool().closed()) {
    throw ClosedError(name_of(op, position) + ": the host pool of group " + std::to_string(op.group) +
                      " was closed");
  }
  check_range(op.blocks, view->view().first_block(), view->view().num_blocks(), "block", op, position, "");
  const int64_t ready = view->pool().ready_slots();
  const int64_t slots = view->pool().geometry().slots;
  check_range(op.slots, 0, ready, "slot", op, position,
              ready < slots ? " (ready), of " + std::to_string(slots) : std::string());
  if (target_ids != nullptr) check_distinct(*target_ids, target, op, position);
  return sizes;
}

void check_edges(const GraphSpec& graph) {
  for (const EdgeSpec& edge : graph.edges) {
    const std::string name = "edge " + std::to_string(edge.before) + " -> " + std::to_string(edge.after);
    if (edge.before < 0 || edge.after <= edge.before || static_cast<size_t>(edge.after) >= graph.ops.size()) {
      throw ContractError(name + ": must lead forward between ops [0, " + std::to_string(graph.ops.size()) +
                          ")");
    }
    if (!in_range(edge.kind, 2)) {
      throw ContractError(name + ": kind " + std::to_string(static_cast<int>(edge.kind)) +
                          ": must be 0 or 1");
    }
    const size_t before = graph.ops[static_cast<size_t>(edge.before)].pages();
    const size_t after = graph.ops[static_cast<size_t>(edge.after)].pages();
    if (edge.kind == EdgeKind::kStream && before != after) {
      throw ContractError(name + ": a stream edge needs as many pages on both sides, given " +
                          std::to_string(before) + " and " + std::to_string(after));
    }
  }
}

void check_gate(const GraphSpec& graph) {
  for (size_t i = 0; graph.gated && i < graph.ops.size(); ++i) {
    const OpSpec& op = graph.ops[i];
    if (op.kind == OpKind::kD2H && op.layerwise) continue;
    throw ContractError(name_of(op, i) + ": a " + (op.layerwise ? "layerwise " : "") + to_string(op.kind) +
                        " in a gated graph, which takes layerwise D2H only");
  }
}

}  // namespace flexkv
