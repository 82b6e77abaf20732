// Binds the block index of csrc/index. Calls do not release the GIL: they take only microseconds, and a
// statistics thread must not read the index in the middle of a change.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <random>
#include <string>

#include "base/error.h"
#include "bindings/aligned_array.h"
#include "bindings/bindings.h"
#include "bindings/index_arguments.h"
#include "bindings/list_argument.h"
#include "bindings/native_class.h"
#include "index/block_index.h"
#include "index/slot_run.h"
#include "share/slot_board.h"

namespace py = pybind11;

namespace flexkv {
namespace {

using Expiries = py::array_t<uint64_t, py::array::c_style>;

py::ssize_t length_of(const Entries& entries) { return static_cast<py::ssize_t>(entries_of(entries).size()); }

Bytes flags_for(const Entries& entries) { return Bytes(length_of(entries)); }

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

Bytes array_of(const std::vector<BlockKey>& keys) {
  Bytes rows({keys.size(), kKeyBytes});
  if (!keys.empty()) std::memcpy(rows.mutable_data(), keys.data(), keys.size() * kKeyBytes);
  return rows;
}

// Returns an array over the vector's own memory. But if the vector's capacity is much larger than its size,
// copies the values, because Python may keep the array, and so all of the vector's memory, for a long time.
template <class T>
py::array_t<T> array_over(std::vector<T>&& values) {
  if (values.capacity() > 2 * values.size()) return array_of(values);
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  const py::capsule base(owner.get(), [](void* held) { delete static_cast<std::vector<T>*>(held); });
  const std::vector<T>& held = *owner.release();
  return py::array_t<T>(static_cast<py::ssize_t>(held.size()), held.data(), base);
}

py::tuple insert(BlockIndex& index, uint32_t group, const py::array& keys, size_t max_new, int64_t filler,
                 uint32_t leases, bool spare) {
  Inserted done = index.insert(group, keys_of(keys), max_new, filler, leases, spare);
  return py::make_tuple(array_over(std::move(done.positions)), array_over(std::move(done.entries)),
                        array_over(std::move(done.slots)), array_of(done.evicted), done.known, done.dropped);
}

}  // namespace

void bind_index(py::module_& m) {
  m.def(
      "in_a_row",
      [](const Slots& slots) {
        if (slots.ndim() != 1) throw ContractError("in_a_row: slots must have one dimension");
        require_aligned<ContractError>(slots, "in_a_row: slots");
        return in_a_row({slots.data(), static_cast<size_t>(slots.shape(0))});
      },
      py::arg("slots").noconvert());
  m.def("eviction_policies", [] {
    std::vector<std::string> names;
    for (const PolicyKind& kind : policy_kinds()) names.push_back(kind.name);
    return names;
  });
  NativeBinding<BlockIndex, std::shared_ptr<BlockIndex>>(m, "BlockIndex")
      .def(py::init([](const List<uint32_t>& group_slots, const std::string& policy,
                       const List<uint32_t>& shared_with) {
             std::random_device random;
             return std::make_shared<BlockIndex>(group_slots, policy, uint64_t{random()} << 32 | random(),
                                                 shared_with);
           }),
           py::arg("group_slots"), py::arg("policy") = "lru", py::arg("shared_with") = py::list())
      .def("grow", &BlockIndex::grow, py::arg("group"), py::arg("slots"))
      .def(
          "tell",
          [](BlockIndex& index, std::shared_ptr<SlotBoard> board) {
            if (index.most_slots() > board->slots()) {
              throw BlockRangeError("a board of " + std::to_string(board->slots()) + " slots for " +
                                    std::to_string(index.most_slots()));
            }
            index.tell(std::move(board));
          },
          py::arg("board"))
      .def(
          "match_prefix",
          [](const BlockIndex& index, uint32_t group, const py::array& keys) {
            const auto span = keys_of(keys);
            Entries entries(static_cast<py::ssize_t>(span.size()));
            const size_t found = index.match_prefix(group, span, entries.mutable_data());
            if (found < span.size()) entries.resize({found}, false);
            return entries;
          },
          py::arg("group"), py::arg("keys"))
      .def(
          "match_and_pin",
          [](BlockIndex& index, uint32_t group, const py::array& keys) {
            const auto span = keys_of(keys);
            Entries entries(static_cast<py::ssize_t>(span.size()));
            py::array_t<int32_t> slots(static_cast<py::ssize_t>(span.size()));
            const size_t found =
                index.match_and_pin(group, span, entries.mutable_data(), slots.mutable_data());
            if (found < span.size()) {
              entries.resize({found}, false);
              slots.resize({found}, false);
            }
            return py::make_tuple(entries, slots);
          },
          py::arg("group"), py::arg("keys"))
      .def(
          "find",
          [](const BlockIndex& index, uint32_t group, const py::array& keys, bool ready_only) {
            const auto span = keys_of(keys);
            Entries entries(static_cast<py::ssize_t>(span.size()));
            index.find(group, span, ready_only, entries.mutable_data());
            return entries;
          },
          py::arg("group"), py::arg("keys"), py::arg("ready_only") = true)
      .def(
          "find_marked",
          [](const BlockIndex& index, uint32_t group, const py::bytes& mark) {
            const std::string_view bytes(mark);
            KeyMark wanted;
            if (bytes.size() != wanted.size()) {
              throw KeySchemeError("the mark has " + std::to_string(bytes.size()) + " bytes; allowed are " +
                                   std::to_string(wanted.size()));
            }
            std::copy(bytes.begin(), bytes.end(), wanted.begin());
            return array_of(index.find_marked(group, wanted));
          },
          py::arg("group"), py::arg("mark"))
      .def(
          "pin",
          [](BlockIndex& index, const Entries& entries) {
            py::array_t<int32_t> slots(length_of(entries));
            index.pin(entries_of(entries), slots.mutable_data());
            return slots;
          },
          py::arg("entries").noconvert())
      .def(
          "pin_found",
          [](BlockIndex& index, uint32_t group, const py::array& keys, const Entries& entries) {
            const auto span = keys_of(keys);
            const auto found = entries_of(entries);
            if (found.size() != span.size())
              throw ContractError("pin_found: " + std::to_string(found.size()) + " entries of " +
                                  std::to_string(span.size()) + " keys");
            py::array_t<int32_t> slots(length_of(entries));
            index.pin_found(group, span, found.data(), slots.mutable_data());
            return slots;
          },
          py::arg("group"), py::arg("keys"), py::arg("entries").noconvert())
      .def(
          "pin_coming",
          [](BlockIndex& index, const Entries& entries) {
            py::array_t<int32_t> slots(length_of(entries));
            index.pin_coming(entries_of(entries), slots.mutable_data());
            return slots;
          },
          py::arg("entries").noconvert())
      .def(
          "unpin",
          [](BlockIndex& index, const Entries& entries, bool hit) {
            index.unpin(entries_of(entries), Use{.hit = hit});
          },
          py::arg("entries").noconvert(), py::arg("hit") = false)
      .def(
          "touch",
          [](BlockIndex& index, const Entries& entries, size_t hits) {
            index.touch(entries_of(entries), hits);
          },
          py::arg("entries").noconvert(), py::arg("hits") = 0)
      .def("insert", &insert, py::arg("group"), py::arg("keys"), py::arg("max_new"), py::arg("filler") = 0,
           py::arg("leases") = 0, py::arg("spare") = false)
      .def(
          "spare",
          [](const BlockIndex& index, const Entries& entries) {
            Bytes spare = flags_for(entries);
            index.copy_spare(entries_of(entries), spare.mutable_data());
            return spare;
          },
          py::arg("entries").noconvert())
      .def(
          "fillers",
          [](const BlockIndex& index, const Entries& entries) {
            py::array_t<int64_t> fillers(length_of(entries));
            index.copy_fillers(entries_of(entries), fillers.mutable_data());
            return fillers;
          },
          py::arg("entries").noconvert())
      .def(
          "set_expiry",
          [](BlockIndex& index, const Entries& entries, const Expiries& expiries) {
            if (expiries.ndim() != 1 || expiries.shape(0) != length_of(entries)) {
              throw ContractError("set_expiry: one expiry an entry is needed");
            }
            require_aligned<ContractError>(expiries, "set_expiry: expiries");
            index.set_expiry(entries_of(entries), expiries.data());
          },
          py::arg("entries").noconvert(), py::arg("expiries").noconvert())
      .def(
          "expiries",
          [](const BlockIndex& index, const Entries& entries) {
            Expiries expiries(length_of(entries));
            index.copy_expiries(entries_of(entries), expiries.mutable_data());
            return expiries;
          },
          py::arg("entries").noconvert())
      .def(
          "count_ready",
          [](const BlockIndex& index, uint32_t group, const Bytes& keys, const Entries& entries) {
            return index.count_ready(group, keys_of(keys), entries_of(entries));
          },
          py::arg("group"), py::arg("keys").noconvert(), py::arg("entries").noconvert())
      .def(
          "evict",
          [](BlockIndex& index, uint32_t group, size_t count) { return array_of(index.evict(group, count)); },
          py::arg("group"), py::arg("count"))
      .def(
          "finish",
          [](BlockIndex& index, const Entries& entries, const Bytes& ok, uint32_t leases) {
            if (ok.ndim() != 1 || ok.shape(0) != length_of(entries)) {
              throw ContractError("finish: one flag an entry is needed");
            }
            Bytes published = flags_for(entries);
            index.finish(entries_of(entries), ok.data(), published.mutable_data(), leases);
            return published;
          },
          py::arg("entries").noconvert(), py::arg("ok").noconvert(), py::arg("leases") = 0)
      .def(
          "remove",
          [](BlockIndex& index, const Entries& entries) {
            Bytes removed = flags_for(entries);
            index.remove(entries_of(entries), removed.mutable_data());
            return removed;
          },
          py::arg("entries").noconvert())
      .def(
          "ready",
          [](const BlockIndex& index, const Entries& entries) {
            Bytes flags = flags_for(entries);
            index.ready(entries_of(entries), flags.mutable_data());
            return flags;
          },
          py::arg("entries").noconvert())
      .def(
          "adopt",
          [](BlockIndex& index, uint32_t group, const py::array& keys, const Slots& slots,
             const std::optional<Entries>& groups) {
            const auto span = keys_of(keys);
            if (slots.ndim() != 1 || static_cast<size_t>(slots.shape(0)) != span.size()) {
              throw ContractError("adopt: one slot a key is needed");
            }
            require_aligned<ContractError>(slots, "adopt: slots");
            Bytes taken(static_cast<py::ssize_t>(span.size()));
            index.adopt(group, span, slots.data(), taken.mutable_data(),
                        groups ? entries_of(*groups) : std::span<const EntryId>{});
            return taken;
          },
          py::arg("group"), py::arg("keys"), py::arg("slots").noconvert(), py::arg("groups") = py::none())
      .def("gone_groups",
           [](const BlockIndex& index) {
             const auto groups = index.gone_groups();
             return array_of(std::vector<uint32_t>(groups.begin(), groups.end()));
           })
      .def(
          "groups_of",
          [](const BlockIndex& index, const Entries& entries) {
            const auto span = entries_of(entries);
            Entries groups(static_cast<py::ssize_t>(span.size()));
            index.copy_groups(span, groups.mutable_data());
            return groups;
          },
          py::arg("entries").noconvert())
      .def(
          "take_coldest",
          [](BlockIndex& index, uint32_t group, size_t count) {
            return array_of(index.take_coldest(group, count));
          },
          py::arg("group"), py::arg("count"))
      .def(
          "retire",
          [](BlockIndex& index, uint32_t group, const Bytes& gone) {
            if (gone.ndim() != 1) throw ContractError("retire: flags must have one dimension");
            return array_of(index.retire(group, {gone.data(), static_cast<size_t>(gone.shape(0))}));
          },
          py::arg("group"), py::arg("gone").noconvert())
      .def(
          "slots_of",
          [](const BlockIndex& index, const Entries& entries) {
            Slots slots(length_of(entries));
            index.copy_slots(entries_of(entries), slots.mutable_data());
            return slots;
          },
          py::arg("entries").noconvert())
      .def(
          "pins_of",
          [](const BlockIndex& index, const Entries& entries) {
            py::array_t<uint32_t> pins(length_of(entries));
            index.copy_pins(entries_of(entries), pins.mutable_data());
            return pins;
          },
          py::arg("entries").noconvert())
      .def("clear", &BlockIndex::clear)
      .def(
          "keys_of",
          [](const BlockIndex& index, const Entries& entries) {
            Bytes keys({entries_of(entries).size(), kKeyBytes});
            index.copy_keys(entries_of(entries), keys.mutable_data());
            return keys;
          },
          py::arg("entries").noconvert())
      .def("__len__", &BlockIndex::size)
      .def("free_slots", &BlockIndex::free_slots, py::arg("group"))
      .def("up_slots", &BlockIndex::up_slots, py::arg("group"))
      .def("idle_slots", &BlockIndex::idle_slots, py::arg("group"))
      .def_property_readonly("evictions", &BlockIndex::evictions)
      .def(
          "keep_leases",
          [](BlockIndex& index, const Entries& leased) { return index.keep_leases(entries_of(leased)); },
          py::arg("leased").noconvert())
      .def(
          "check_integrity",
          [](const BlockIndex& index, const Entries& pinned) { index.check_integrity(entries_of(pinned)); },
          py::arg("pinned").noconvert());
}

}  // namespace flexkv
