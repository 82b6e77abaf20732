// BlockIndex::check_integrity, which checks the invariants of the index. It does not use the code that
// maintains the invariants.
#include <string>

#include "base/error.h"
#include "index/block_index.h"

namespace flexkv {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw ContractError("block index: " + what);
}

std::string named(EntryId id) { return "entry " + std::to_string(id); }

}  // namespace

void BlockIndex::check_integrity(std::span<const EntryId> pinned) const {
  std::vector<uint32_t> seen(table_.end(), 0);
  check_lists(seen);
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    const bool in_use = table_[id].state() != EntryState::kFree;
    require(seen[id] == (in_use ? 1U : 0U), named(id) + " is in " + std::to_string(seen[id]) + " lists");
  }

  std::vector<uint32_t> leases(table_.end(), 0);
  for (const EntryId id : pinned) {
    require(id >= table_.first() && id < table_.end(), named(id) + " is leased and was never in use");
    ++leases[id];
  }
  size_t in_map = 0;
  std::vector<size_t> pinned_entries(classes_.size(), 0);
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    const Entry& entry = table_[id];
    if (leases[id] > 0) ++pinned_entries[class_of_[entry.group()]];
    if (entry.state() == EntryState::kFree) {
      require(leases[id] == 0, named(id) + " is free and leased");
      continue;
    }
    require(entry.pins() == leases[id], named(id) + " has " + std::to_string(entry.pins()) + " pins and " +
                                            std::to_string(leases[id]) + " leases");
    if (entry.state() == EntryState::kRemoved) {
      require(entry.pins() > 0, named(id) + " is removed, unleased and not freed");
      continue;
    }
    ++in_map;
    require(entry.state() == EntryState::kReady || entry.pins() > 0, named(id) + " is pending and unleased");
    require(lookup(entry.group(), entry.key, map_.hash(entry.key)) == id,
            named(id) + " is not found by its key");
  }
  for (size_t number = 0; number < classes_.size(); ++number) {
    require(classes_[number].pinned == pinned_entries[number],
            "class " + std::to_string(number) + " counts " + std::to_string(classes_[number].pinned) +
                " entries with pins of " + std::to_string(pinned_entries[number]));
  }
  require(map_.size() == in_map,
          "the map counts " + std::to_string(map_.size()) + " blocks of " + std::to_string(in_map));
  size_t places = 0;
  map_.for_each([&](uint32_t hash, EntryId id) {
    ++places;
    require(id >= table_.first() && id < table_.end(),
            "the map names " + named(id) + ", which was never in use");
    const EntryState state = table_[id].state();
    require(state == EntryState::kReady || state == EntryState::kPending,
            "the map names the gone " + named(id));
    require(map_.hash(table_[id].key) == hash, named(id) + " lies under another key's hash");
  });
  require(places == in_map, "the map holds " + std::to_string(places) + " places");
  check_slots();
}

void BlockIndex::check_lists(std::vector<uint32_t>& seen) const {
  for (uint32_t number = 0; number < classes_.size(); ++number) {
    const EntryId head = classes_[number].leased;
    for (size_t list = 0; list < 2 + policy_lists_; ++list) {
      check_list(number, head + static_cast<EntryId>(list), seen);
    }
    classes_[number].policy->check_integrity();
    size_t spares = 0;
    for (EntryId id = table_.first(); id < table_.end(); ++id) {
      const bool mine = table_[id].state() != EntryState::kFree && class_of_[table_[id].group()] == number;
      spares += mine && is_spare(id);
    }
    require(spares == classes_[number].spares,
            "class " + std::to_string(number) + " counts its spare blocks wrongly");
  }
  size_t listed = 0;
  for (EntryId at = table_.free_head(); at != kNoEntry; at = table_[at].older) {
    require(at >= table_.first() && at < table_.end(), "the free list names " + named(at));
    require(table_[at].state() == EntryState::kFree, named(at) + " is in use and on the free list");
    require(++listed <= table_.free_listed(), "the free list is longer than its count");
  }
  require(listed == table_.free_listed(), "the free list is shorter than its count");
}

void BlockIndex::check_list(uint32_t number, EntryId head, std::vector<uint32_t>& seen) const {
  const bool leased = head == classes_[number].leased;
  const bool spare = head == classes_[number].spare;
  require(table_[head].state() == EntryState::kFree, named(head) + " is a list head in use");
  for (EntryId at = head;;) {
    const EntryId next = table_[at].older;
    require(next < table_.end(), named(at) + " links to " + named(next));
    require(table_[next].newer == at, named(at) + " and " + named(next) + " do not link to each other");
    if (next == head) break;
    require(next >= table_.first(), named(at) + " links to another list's head");
    require(++seen[next] == 1, named(next) + " is linked twice");
    require(class_of_[table_[next].group()] == number,
            named(next) + " is in a list of slots that are not its group's");
    const bool pinned = table_[next].pins() > 0;
    require(!leased || pinned, named(next) + " is in the list of leased ones without a lease");
    require(pinned || table_[next].state() == EntryState::kReady, named(next) + " is evictable");
    require(pinned || is_spare(next) == spare, named(next) + (spare ? " is no spare block and in their list"
                                                                    : " is a spare block in another list"));
    at = next;
  }
}

void BlockIndex::check_slots() const {
  std::vector<std::vector<uint8_t>> owners;
  for (const SizeClass& each : classes_) owners.emplace_back(each.pool.unused_from(), uint8_t{0});
  const auto own = [&](uint32_t number, uint32_t slot) {
    require(slot < classes_[number].pool.unused_from(),
            "slot " + std::to_string(slot) + " of class " + std::to_string(number) + " never left its pool");
    require(++owners[number][slot] == 1,
            "slot " + std::to_string(slot) + " of class " + std::to_string(number) + " has two owners");
  };
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    if (table_[id].state() != EntryState::kFree) own(class_of_[table_[id].group()], table_[id].slot);
  }
  for (uint32_t number = 0; number < classes_.size(); ++number) {
    const SlotPool& pool = classes_[number].pool;
    size_t retired_unused = 0;
    for (uint32_t slot = pool.unused_from(); slot < pool.up(); ++slot)
      retired_unused += pool.is_retired(slot);
    require(pool.free() == pool.freed().size() + (pool.up() - pool.unused_from()) - retired_unused,
            "class " + std::to_string(number) + " counts its free slots wrongly");
    for (const uint32_t slot : pool.freed()) {
      require(!pool.is_retired(slot), "slot " + std::to_string(slot) + " is free and out of use for good");
      own(number, slot);
    }
    require(pool.unused_from() <= pool.up(),
            "class " + std::to_string(number) + " uses slots that are not up");
    for (uint32_t slot = 0; slot < pool.unused_from(); ++slot) {
      require(owners[number][slot] == 1 || pool.is_retired(slot),
              "slot " + std::to_string(slot) + " of class " + std::to_string(number) + " has no owner");
    }
  }
}

}  // namespace flexkv
