// Binds lookups over all tiers. Calls do not release the GIL, like the calls of the block index. The arrays
// of a lookup's result are made on demand, over the result's own memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/index_arguments.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "index/boundary_lookup.h"
#include "index/tier_lookup.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// Converts the number of pages that a lookup may fetch. The number is negative if more pages are reserved
// than allowed. A negative number counts as 0.
size_t room_of(int64_t pages) { return pages > 0 ? static_cast<size_t>(pages) : 0; }

// Unit: tokens. The maximum length of a request. With longer requests, products could overflow.
constexpr int64_t kMostRequestTokens = int64_t{1} << 40;

RuleKind rule_kind(const std::string& name) {
  for (const auto& [kind, known] : kRuleKinds) {
    if (name == known) return kind;
  }
  throw ConfigError("rule '" + name + "'; allowed are full, window, chunk and state");
}

GroupRule make_rule(const std::string& kind, int64_t block_tokens, int64_t reach) {
  for (const int64_t number : {block_tokens, reach}) {
    if (number >= 0 && number <= std::numeric_limits<int32_t>::max()) continue;
    throw ConfigError("a rule with blocks of " + std::to_string(block_tokens) + " tokens and reach " +
                      std::to_string(reach) + "; allowed are numbers up to 2**31 - 1");
  }
  const GroupRule rule{rule_kind(kind), static_cast<uint32_t>(block_tokens), static_cast<uint32_t>(reach)};
  rule.check();
  return rule;
}

py::object look_for_lengths(BoundaryLookup& lookup, const List<py::array>& keys, int64_t start_tokens,
                            int64_t room_pages, uint32_t tiers_mask, uint64_t now_s, bool coming,
                            int64_t most) {
  if (start_tokens < 0 || start_tokens > kMostRequestTokens) {
    throw BlockRangeError("look from token " + std::to_string(start_tokens) + "; allowed are 0 to 2**40");
  }
  if (most < 1 || most > kMostLengths) {
    throw BlockRangeError("look for " + std::to_string(most) + " lengths; allowed are 1 to " +
                          std::to_string(kMostLengths));
  }
  if (keys.size() != lookup.groups()) {
    throw ContractError("look: keys of " + std::to_string(keys.size()) + " groups; the lookup has " +
                        std::to_string(lookup.groups()));
  }
  std::vector<std::span<const BlockKey>> offered;
  offered.reserve(keys.size());
  for (size_t group = 0; group < keys.size(); ++group) {
    const auto all = keys_of(keys[group]);
    const size_t had = static_cast<size_t>(start_tokens) / lookup.rule(group).block_tokens;
    offered.push_back(all.subspan(std::min(all.size(), had)));
  }
  auto made = std::make_unique<FoundLengths>();
  FoundLengths& found = *made;
  py::object object = py::cast(std::move(made));
  const LookupTerms terms{room_of(room_pages), tiers_mask, now_s, coming};
  lookup.look(offered, static_cast<uint64_t>(start_tokens), terms, static_cast<size_t>(most), found);
  return object;
}

py::object look(TierLookup& lookup, const List<py::array>& keys, int64_t start_block, int64_t room_pages,
                uint32_t tiers_mask, uint64_t now_s, bool coming) {
  if (start_block < 0) {
    throw BlockRangeError("look: start block " + std::to_string(start_block) + "; allowed are 0 and more");
  }
  std::vector<std::span<const BlockKey>> offered;
  offered.reserve(keys.size());
  for (const py::array& of_group : keys) {
    const auto all = keys_of(of_group);
    offered.push_back(all.subspan(std::min(all.size(), static_cast<size_t>(start_block))));
  }
  // The Python object is made before the lookup. So if it cannot be made, no page has been leased yet.
  auto made = std::make_unique<Found>();
  Found& found = *made;
  py::object object = py::cast(std::move(made));
  lookup.look(offered, {room_of(room_pages), tiers_mask, now_s, coming}, found);
  return object;
}

void trim(TierLookup& lookup, Found& found, int64_t blocks) {
  if (blocks < 0) {
    throw BlockRangeError("trim to " + std::to_string(blocks) + " blocks; allowed are 0 to " +
                          std::to_string(found.blocks));
  }
  lookup.trim(found, static_cast<size_t>(blocks));
}

const FoundGroup& group_at(const FoundPages& found, int64_t group) {
  if (group >= 0 && static_cast<size_t>(group) < found.groups.size()) {
    return found.groups[static_cast<size_t>(group)];
  }
  throw BlockRangeError("group " + std::to_string(group) + "; allowed are 0 to " +
                        std::to_string(static_cast<int64_t>(found.groups.size()) - 1));
}

// Returns a read-only array over memory that belongs to `owner`. The array keeps `owner` alive.
template <class T>
py::array_t<T> view_of(const T* data, size_t count, const py::object& owner) {
  py::array_t<T> view(static_cast<py::ssize_t>(count), data, owner);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

Slots runs_of(const FoundGroup& group) {
  static_assert(sizeof(FoundRun) == 4 * sizeof(int32_t));
  Slots rows({group.runs.size(), size_t{4}});
  if (!group.runs.empty()) {
    std::memcpy(rows.mutable_data(), group.runs.data(), group.runs.size() * sizeof(FoundRun));
  }
  return rows;
}

// Returns (tier, group, entries) for each pair of tier and group that has expired entries.
py::list expired_of(const FoundPages& found) {
  py::list parts;
  for (size_t at = 0; at < found.expired.size();) {
    const ExpiredPage& first = found.expired[at];
    std::vector<EntryId> entries;
    for (; at < found.expired.size(); ++at) {
      const ExpiredPage& page = found.expired[at];
      if (page.tier != first.tier || page.group != first.group) break;
      entries.push_back(page.entry);
    }
    parts.append(py::make_tuple(first.tier, first.group,
                                Entries(static_cast<py::ssize_t>(entries.size()), entries.data())));
  }
  return parts;
}

// Binds the members that Found and FoundLengths have in common.
template <class Pages>
auto bind_found(py::module_& m, const char* name) {
  const auto view = [](const py::object& self, int64_t group, auto array) {
    const FoundGroup& pages = group_at(self.cast<const Pages&>(), group);
    return view_of((pages.*array).get(), pages.pages - pages.first, self);
  };
  return NativeBinding<Pages>(m, name)
      .def_readonly("cut", &Pages::cut)
      .def_property_readonly("leased", [](const Pages& found) { return found.lease == FoundLease::kHeld; })
      .def_property_readonly("groups", [](const Pages& found) { return found.groups.size(); })
      .def_property_readonly("expired", [](const Pages& found) { return expired_of(found); })
      .def(
          "entries",
          [view](const py::object& self, int64_t group) { return view(self, group, &FoundGroup::entries); },
          py::arg("group"))
      .def(
          "slots",
          [view](const py::object& self, int64_t group) { return view(self, group, &FoundGroup::slots); },
          py::arg("group"))
      .def(
          "runs", [](const Pages& found, int64_t group) { return runs_of(group_at(found, group)); },
          py::arg("group"))
      .def("detach", [](Pages& found) { found.detach(); });
}

void bind_boundary_lookup(py::module_& m) {
  NativeBinding<GroupRule>(m, "GroupRule")
      .def(py::init(&make_rule), py::arg("kind"), py::arg("block_tokens"), py::arg("reach") = 0);
  bind_found<FoundLengths>(m, "FoundLengths")
      .def_property_readonly("lengths", [](const FoundLengths& found) { return py::cast(found.lengths); })
      .def_readonly("start_tokens", &FoundLengths::start)
      .def_readonly("ready", &FoundLengths::ready)
      .def_readonly("shared_tokens", &FoundLengths::shared)
      .def(
          "first_page", [](const FoundLengths& found, int64_t group) { return group_at(found, group).first; },
          py::arg("group"));
  NativeBinding<BoundaryLookup>(m, "BoundaryLookup")
      .def(py::init([](std::shared_ptr<TierLookup> tiers, const List<GroupRule>& rules, int64_t alignment) {
             if (alignment < 1 || alignment > kMostRequestTokens) {
               throw ConfigError("hits aligned to " + std::to_string(alignment) +
                                 " tokens; allowed are 1 to 2**40");
             }
             return std::make_unique<BoundaryLookup>(std::move(tiers), rules,
                                                     static_cast<uint64_t>(alignment));
           }),
           py::arg("tiers"), py::arg("rules"), py::arg("alignment_tokens"))
      .def_property_readonly("groups", &BoundaryLookup::groups)
      .def("look", &look_for_lengths, py::arg("keys"), py::arg("start_tokens"), py::arg("room_pages"),
           py::arg("tiers_mask"), py::arg("now_s"), py::arg("coming") = true, py::arg("most") = 1)
      .def(
          "keep",
          [](BoundaryLookup& lookup, FoundLengths& found, int64_t tokens) {
            if (tokens < 0) {
              throw BlockRangeError("keep " + std::to_string(tokens) + " tokens; allowed are 0 and more");
            }
            lookup.keep(found, static_cast<uint64_t>(tokens));
          },
          py::arg("found"), py::arg("tokens"))
      .def("release", &BoundaryLookup::release, py::arg("found"));
}

}  // namespace

void bind_lookup(py::module_& m) {
  bind_found<Found>(m, "Found")
      .def_readonly("blocks", &Found::blocks)
      .def_readonly("ready_blocks", &Found::ready_blocks);
  NativeBinding<TierLookup, std::shared_ptr<TierLookup>>(m, "TierLookup")
      .def(py::init([](const List<std::shared_ptr<BlockIndex>>& presences, int64_t groups) {
             if (groups < 0) {
               throw ContractError("a lookup over " + std::to_string(groups) +
                                   " groups; needed is the number of groups of each index");
             }
             return std::make_shared<TierLookup>(presences, static_cast<size_t>(groups));
           }),
           py::arg("presences"), py::arg("groups"))
      .def_property_readonly("tiers", &TierLookup::tiers)
      .def_property_readonly("groups", &TierLookup::groups)
      .def("look", &look, py::arg("keys"), py::arg("start_block"), py::arg("room_pages"),
           py::arg("tiers_mask"), py::arg("now_s"), py::arg("coming") = true)
      .def("trim", &trim, py::arg("found"), py::arg("blocks"))
      .def("release", &TierLookup::release, py::arg("found"))
      .def("count_ready", &TierLookup::count_ready, py::arg("found"))
      .def(
          "present",
          [](TierLookup& lookup, uint32_t group, const py::array& keys, uint32_t tiers_mask, uint64_t now_s) {
            const auto span = keys_of(keys);
            Bytes tiers(static_cast<py::ssize_t>(span.size()));
            lookup.present(group, span, tiers_mask, now_s, tiers.mutable_data());
            return tiers;
          },
          py::arg("group"), py::arg("keys"), py::arg("tiers_mask"), py::arg("now_s"));
  bind_boundary_lookup(m);
}

}  // namespace flexkv
