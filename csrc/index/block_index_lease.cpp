// The calls of BlockIndex that add and end leases. When leases end, they also update the order of eviction.
#include "base/error.h"
#include "index/block_index.h"

namespace flexkv {
namespace {

// How many entries ahead `pin` prefetches. Values from 8 to 64 were measured on Zen 3: from 16 on, a larger
// value does not reduce the time.
constexpr size_t kPinAhead = 16;

}  // namespace

void BlockIndex::pin(std::span<const EntryId> entries, int32_t* slots) {
  // Pinning leaves an entry in its list, because unlinking the entry would access both its neighbours, which
  // may be anywhere in memory. If an eviction finds the pinned entry in the list, it takes the entry out of
  // the list.
  if (entries.empty()) return;
  const bool any_known = entries[0] >= table_.first() && entries[0] < table_.end();
  const uint32_t group = any_known ? table_[entries[0]].group() : 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryId id = entries[i];
    if (i + kPinAhead < entries.size()) table_.prefetch(entries[i + kPinAhead]);
    if (id < table_.first() || id >= table_.end() || !table_[id].is_ready_in(group) ||
        table_[id].pins() == Entry::kMaxPins) {
      take_back(entries.first(i));
      throw ContractError("pin: entry " + std::to_string(id) +
                          " is not a ready block of its group, or has too many leases");
    }
    add_pin(id);
    slots[i] = static_cast<int32_t>(table_[id].slot);
  }
}

void BlockIndex::pin_found(uint32_t group, std::span<const BlockKey> keys, const EntryId* entries,
                           int32_t* slots) {
  for (size_t i = 0; i < keys.size(); ++i) {
    const EntryId id = entries[i];
    if (i + kPinAhead < keys.size()) table_.prefetch(entries[i + kPinAhead]);
    if (!is_known(id) || !is_block_in(id, EntryState::kReady, group, keys[i]) ||
        table_[id].pins() == Entry::kMaxPins) {
      take_back({entries, i});
      throw ContractError("pin_found: entry " + std::to_string(id) +
                          " is not the ready block of key number " + std::to_string(i) +
                          ", or has too many leases");
    }
    add_pin(id);
    slots[i] = static_cast<int32_t>(table_[id].slot);
  }
}

void BlockIndex::pin_coming(std::span<const EntryId> entries, int32_t* slots) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryId id = entries[i];
    const bool known = id >= table_.first() && id < table_.end();
    const bool coming = known && table_[id].state() == EntryState::kPending && table_[id].pins() > 0;
    const bool there = known && table_[id].state() == EntryState::kReady;
    if ((!coming && !there) || table_[id].pins() == Entry::kMaxPins) {
      take_back(entries.first(i));
      throw ContractError("pin_coming: entry " + std::to_string(id) +
                          " is neither a block nor on its way to be one, or has too many leases");
    }
    add_pin(id);
    slots[i] = static_cast<int32_t>(table_[id].slot);
  }
}

int32_t BlockIndex::pin_one(EntryId entry) {
  if (table_[entry].pins() == Entry::kMaxPins) {
    throw ContractError("entry " + std::to_string(entry) + " has " + std::to_string(Entry::kMaxPins) +
                        " leases; it cannot have more");
  }
  add_pin(entry);
  return static_cast<int32_t>(table_[entry].slot);
}

void BlockIndex::admit(EntryId first, EntryId last, const Use& use) {
  SizeClass& owner = class_of(table_[first]);
  if (!is_spare(first)) return owner.policy->admit(first, last, use);
  if (!use.hit) return table_.link_after(owner.spare, first, last);
  for (EntryId id = first;; id = table_[id].older) {
    end_spare(id);
    if (id == last) break;
  }
  owner.policy->admit(first, last, use);
}

void BlockIndex::unpin(std::span<const EntryId> entries, const Use& use) {
  // The loop goes from the last entry to the first. So each chain is admitted before the chain that precedes
  // it in the request, and is evicted earlier.
  for (size_t i = entries.size(); i > 0;) {
    const EntryId last = entries[--i];
    check_pinned(last);
    Entry& entry = table_[last];
    --entry.meta;
    if (entry.pins() > 0) continue;
    size_t& pinned = class_of(entry).pinned;
    --pinned;
    if (entry.state() != EntryState::kReady) {
      table_.unlink(last, last);
      free_entry(last);
      continue;
    }
    const uint32_t pinned_once = entry.meta + 1;
    EntryId first = last;
    while (i > 0 && table_[first].newer == entries[i - 1] && table_[entries[i - 1]].meta == pinned_once &&
           is_spare(entries[i - 1]) == is_spare(last)) {
      first = entries[--i];
      --table_[first].meta;
      --pinned;
    }
    table_.unlink(first, last);
    admit(first, last, use);
  }
}

size_t BlockIndex::keep_leases(std::span<const EntryId> leased) {
  std::vector<uint32_t> kept(table_.end(), 0);
  for (const EntryId id : leased) {
    if (!is_leased(id) || kept[id] == table_[id].pins()) {
      throw ContractError("keep_leases: entry " + std::to_string(id) +
                          " is not leased, or not as often as it is named");
    }
    ++kept[id];
  }
  size_t ended = 0;
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    if (!is_leased(id) || table_[id].pins() == kept[id]) continue;
    if (kept[id] == 0 && table_[id].state() == EntryState::kPending) take_from_map(id);
    for (uint32_t extra = table_[id].pins() - kept[id]; extra > 0; --extra, ++ended) {
      unpin(std::span<const EntryId>(&id, 1));
    }
  }
  return ended;
}

void BlockIndex::touch(std::span<const EntryId> entries, size_t hits) {
  const auto evictable = [&](EntryId id) {
    return id >= table_.first() && id < table_.end() && table_[id].state() == EntryState::kReady &&
           table_[id].pins() == 0;
  };
  for (size_t i = entries.size(); i > 0;) {
    const EntryId last = entries[--i];
    const Use use{.hit = i < hits};
    if (!evictable(last) || (is_spare(last) && !use.hit)) continue;
    EntryId first = last;
    while (i > 0 && i != hits && table_[first].newer == entries[i - 1] && evictable(entries[i - 1]) &&
           is_spare(entries[i - 1]) == is_spare(last)) {
      first = entries[--i];
    }
    table_.unlink(first, last);
    admit(first, last, use);
  }
}

}  // namespace flexkv
