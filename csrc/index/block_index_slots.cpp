// The calls of BlockIndex that concern slots. They add the blocks that an earlier process left in the tier,
// set the listener, and lease the blocks that will be evicted next. They also retire slots that are lost, and
// read the slots, groups and pins of entries.
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "index/block_index.h"

namespace flexkv {

size_t BlockIndex::adopt(uint32_t group, std::span<const BlockKey> keys, const int32_t* slots, uint8_t* taken,
                         std::span<const uint32_t> groups) {
  SizeClass& owner = class_at(group);
  if (owner.pool.unused_from() != 0) {
    throw ContractError("adopt: group " + std::to_string(group) +
                        ", or one that shares its slots, has given some away already");
  }
  if (!groups.empty() && groups.size() != keys.size()) {
    throw ContractError("adopt: " + std::to_string(groups.size()) + " groups of " +
                        std::to_string(keys.size()) + " blocks");
  }
  for (const uint32_t each : groups) {
    if (&class_at(each) == &owner) continue;
    throw ContractError("adopt: group " + std::to_string(each) + " does not share the slots of group " +
                        std::to_string(group));
  }
  std::vector<uint8_t> used(owner.pool.up());
  EntryId first = kNoEntry;
  EntryId last = kNoEntry;
  size_t count = 0;
  // The loop starts with the most recently used block. So the entries of a chain get ascending numbers in the
  // order of the chain's blocks, as when the chain is stored.
  for (size_t i = keys.size(); i > 0;) {
    --i;
    taken[i] = 0;
    const auto slot = static_cast<uint32_t>(slots[i]);
    if (slots[i] < 0 || slot >= used.size() || used[slot] != 0 || owner.pool.is_retired(slot)) continue;
    const uint32_t hash = map_.hash(keys[i]);
    const uint32_t of_block = groups.empty() ? group : groups[i];
    size_t place = 0;
    if (map_.find_or_place(
            hash, [&](EntryId id) { return is_block(id, of_block, keys[i]); }, place) != kNoEntry) {
      continue;
    }
    const EntryId id = table_.allocate();
    if (id == kNoEntry) throw ContractError("adopt: a slot is free but no entry is");
    Entry& entry = table_[id];
    entry.key = keys[i];
    entry.slot = slot;
    entry.meta = Entry::pack(EntryState::kReady, of_block, 0);
    clear_notes(id, 0);
    entry.newer = last;
    if (last != kNoEntry) table_[last].older = id;
    if (first == kNoEntry) first = id;
    last = id;
    map_.put(place, hash, id);
    if (listener_) listener_->publish(slot, of_block, keys[i]);
    used[slot] = 1;
    taken[i] = 1;
    ++count;
  }
  owner.pool.adopt(used);
  if (count > 0) owner.policy->admit(first, last, Use{});
  return count;
}

void BlockIndex::tell(std::shared_ptr<SlotListener> listener) {
  if (classes_.size() != 1) throw ContractError("tell: the groups have slots of their own");
  listener_ = std::move(listener);
  for (EntryId id = table_.first(); listener_ && id < table_.end(); ++id) {
    const Entry& entry = table_[id];
    if (entry.state() == EntryState::kReady) listener_->publish(entry.slot, entry.group(), entry.key);
  }
}

std::vector<EntryId> BlockIndex::take_coldest(uint32_t group, size_t count) {
  SizeClass& owner = class_at(group);
  std::vector<EntryId> taken;
  size_t spares = owner.spares;
  while (taken.size() < count) {
    const EntryId victim = take_victim(owner, spares);
    if (victim == kNoEntry) break;
    table_.link_after(owner.leased, victim, victim);
    if (table_[victim].pins() > 0) continue;
    add_pin(victim);
    taken.push_back(victim);
    spares -= is_spare(victim);
  }
  return taken;
}

std::vector<BlockKey> BlockIndex::retire(uint32_t group, std::span<const uint8_t> gone) {
  SizeClass& owner = class_at(group);
  owner.pool.retire(gone);
  gone_groups_.clear();
  std::vector<BlockKey> lost;
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    const EntryState state = table_[id].state();
    if ((state != EntryState::kReady && state != EntryState::kPending) || &class_of(table_[id]) != &owner ||
        !owner.pool.is_retired(table_[id].slot)) {
      continue;
    }
    if (state == EntryState::kReady) {
      lost.push_back(table_[id].key);
      note_gone(id);
    }
    uint8_t removed = 0;
    remove({&id, 1}, &removed);
  }
  return lost;
}

void BlockIndex::copy_slots(std::span<const EntryId> entries, int32_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < table_.first() || entries[i] >= table_.end()) {
      throw ContractError("copy_slots: entry " + std::to_string(entries[i]) + " was never in use");
    }
    out[i] = static_cast<int32_t>(table_[entries[i]].slot);
  }
}

void BlockIndex::copy_groups(std::span<const EntryId> entries, uint32_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < table_.first() || entries[i] >= table_.end()) {
      throw ContractError("copy_groups: entry " + std::to_string(entries[i]) + " was never in use");
    }
    out[i] = table_[entries[i]].group();
  }
}

void BlockIndex::copy_pins(std::span<const EntryId> entries, uint32_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < table_.first() || entries[i] >= table_.end()) {
      throw ContractError("copy_pins: entry " + std::to_string(entries[i]) + " was never in use");
    }
    out[i] = table_[entries[i]].pins();
  }
}

}  // namespace flexkv
