// Bindings of lookups over all tiers. The GIL stays held, as for the block index. Arrays of what was found
// are made when they are asked for, over its own memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/index_arguments.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "index/tier_lookup.h"

namespace py = pybind11;

namespace flexkv {
namespace {

// Negative room is what is left when more is reserved than is allowed: none.
size_t room_of(int64_t pages) { return pages > 0 ? static_cast<size_t>(pages) : 0; }

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
  // The object first: when it cannot be made, nothing is leased yet.
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

const FoundGroup& group_at(const Found& found, int64_t group) {
  if (group >= 0 && static_cast<size_t>(group) < found.groups.size()) {
    return found.groups[static_cast<size_t>(group)];
  }
  throw BlockRangeError("group " + std::to_string(group) + "; allowed are 0 to " +
                        std::to_string(static_cast<int64_t>(found.groups.size()) - 1));
}

// A read-only array over memory that lives as long as `owner`.
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

// (tier, group, entries) for each tier and group that has any.
py::list expired_of(const Found& found) {
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

}  // namespace

void bind_lookup(py::module_& m) {
  NativeBinding<Found>(m, "Found")
      .def_readonly("blocks", &Found::blocks)
      .def_readonly("ready_blocks", &Found::ready_blocks)
      .def_readonly("cut", &Found::cut)
      .def_property_readonly("leased", [](const Found& found) { return found.lease == FoundLease::kHeld; })
      .def_property_readonly("groups", [](const Found& found) { return found.groups.size(); })
      .def_property_readonly("expired", &expired_of)
      .def(
          "entries",
          [](const py::object& self, int64_t group) {
            const FoundGroup& pages = group_at(self.cast<const Found&>(), group);
            return view_of(pages.entries.get(), pages.pages, self);
          },
          py::arg("group"))
      .def(
          "slots",
          [](const py::object& self, int64_t group) {
            const FoundGroup& pages = group_at(self.cast<const Found&>(), group);
            return view_of(pages.slots.get(), pages.pages, self);
          },
          py::arg("group"))
      .def(
          "runs", [](const Found& found, int64_t group) { return runs_of(group_at(found, group)); },
          py::arg("group"))
      .def("detach", [](Found& found) { found.detach(); });
  NativeBinding<TierLookup>(m, "TierLookup")
      .def(py::init([](const List<std::shared_ptr<BlockIndex>>& presences, int64_t groups) {
             if (groups < 0) {
               throw ContractError("a lookup over " + std::to_string(groups) +
                                   " groups; needed is the number of groups of each index");
             }
             return std::make_unique<TierLookup>(presences, static_cast<size_t>(groups));
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
}

}  // namespace flexkv
