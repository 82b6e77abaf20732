#include "index/block_index.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

// Keys in flight of a batch of probes. Enough to cover memory latency, few enough to stay in the line-fill
// buffers. Source: sweep of 8..64 on Zen 3, flat from 16 on.
constexpr size_t kProbeBatch = 32;

// How many entries ahead `pin` fetches. Source: the same sweep.
constexpr size_t kPinAhead = 16;

// A link is followed only to an entry that is near, so that its line is likely on its way already. A walk
// over links to far entries pays the memory's latency for each, four times the cost of overlapped probes.
constexpr EntryId kNearEntries = 8;

bool near(EntryId from, EntryId to) { return to - from + kNearEntries <= 2 * kNearEntries; }

// How many entries ahead a walk fetches: 16 lines. The hardware's own prefetch stops at every 4 KiB.
constexpr EntryId kWalkAhead = 32;

// Heads a group needs: the list of leased entries, and the policy's.
constexpr size_t kHeadsPerGroup = 1 + EvictionPolicy::kHeads;

size_t total_slots(const std::vector<uint32_t>& group_slots) {
  return std::accumulate(group_slots.begin(), group_slots.end(), size_t{0});
}

}  // namespace

BlockIndex::BlockIndex(const std::vector<uint32_t>& group_slots, const std::string& policy, uint64_t seed)
    : table_(kHeadsPerGroup * group_slots.size(), total_slots(group_slots)),
      map_(total_slots(group_slots), seed) {
  if (group_slots.empty() || group_slots.size() > kMaxGroups) {
    throw ConfigError("the block index was asked for " + std::to_string(group_slots.size()) +
                      " groups; allowed are 1 to " + std::to_string(kMaxGroups));
  }
  EntryId head = 0;
  for (const uint32_t slots : group_slots) {
    groups_.push_back(Group{SlotPool(slots), head, make_eviction_policy(policy, head + 1)});
    head += kHeadsPerGroup;
  }
}

BlockIndex::Group& BlockIndex::group_at(uint32_t group) {
  return const_cast<Group&>(std::as_const(*this).group_at(group));
}

const BlockIndex::Group& BlockIndex::group_at(uint32_t group) const {
  if (group < groups_.size()) return groups_[group];
  throw BlockRangeError("group " + std::to_string(group) + "; allowed are 0 to " +
                        std::to_string(groups_.size() - 1));
}

bool BlockIndex::is_block(EntryId id, uint32_t group, const BlockKey& key) const {
  const Entry& entry = table_[id];
  return entry.key == key && entry.group() == group;
}

bool BlockIndex::is_ready(EntryId id, uint32_t group, const BlockKey& key) const {
  const Entry& entry = table_[id];
  return entry.key == key && entry.is_ready_in(group);
}

EntryId BlockIndex::lookup(uint32_t group, const BlockKey& key, uint32_t hash) const {
  return map_.find(hash, [&](EntryId id) { return is_block(id, group, key); });
}

template <class Visit>
size_t BlockIndex::walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const {
  const uint32_t ready = Entry::pack(EntryState::kReady, group, 0);
  size_t i = 0;
  while (i < keys.size()) {
    // The usual chain lies in ascending order. Comparing with the next number, rather than loading it from
    // the link, lets the CPU run ahead of the loads; one test of all differences keeps it to two branches a
    // block.
    for (; i < keys.size(); ++i, ++at) {
      const Entry& entry = table_[at];
      if (entry.older != at + 1) break;
      const Entry& next = (&entry)[1];
      const uint64_t differs = (next.key.low ^ keys[i].low) | (next.key.high ^ keys[i].high) |
                               ((next.meta & ~Entry::kMaxPins) ^ ready);
      if (differs) break;
      __builtin_prefetch(&entry + kWalkAhead);
      visit(i, at + 1);
    }
    if (i == keys.size()) break;
    const EntryId next = table_[at].older;
    if (!near(at, next) || !is_ready(next, group, keys[i])) break;
    visit(i++, next);
    at = next;
  }
  return i;
}

template <class Visit>
size_t BlockIndex::match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries,
                         Visit visit) const {
  group_at(group);
  std::array<uint32_t, 2 * kProbeBatch> hashes;  // of key k at k modulo the size
  size_t hashed = 0;
  size_t i = 0;
  size_t batch = 1;
  while (i < keys.size()) {
    // One probe at a break between two chains; a growing batch of overlapped ones where no chain is to be
    // found. Then the map's places are fetched a whole batch ahead, so that the pipeline never runs dry.
    const size_t begin = i;
    const size_t end = std::min(keys.size(), i + batch);
    const size_t ahead = std::min(keys.size(), batch == kProbeBatch ? end + kProbeBatch : end);
    for (hashed = std::max(hashed, begin); hashed < ahead; ++hashed) {
      hashes[hashed % hashes.size()] = map_.hash(keys[hashed]);
      map_.prefetch(hashes[hashed % hashes.size()]);
    }
    if (batch > 1) {
      for (size_t k = i; k < end; ++k) {
        const EntryId candidate = map_.candidate(hashes[k % hashes.size()]);
        if (candidate != kNoEntry) table_.prefetch(candidate);
      }
    }
    bool chained = false;
    while (i < end && !chained) {
      const EntryId found = lookup(group, keys[i], hashes[i % hashes.size()]);
      if (found == kNoEntry || !table_[found].is_ready_in(group)) return i;
      chained =
          batch == 1 || (i > begin && table_[entries[i - 1]].older == found && near(entries[i - 1], found));
      visit(i++, found);
    }
    batch = std::min(2 * batch, kProbeBatch);
    if (chained) {
      const size_t from = i;
      const size_t walked = walk(group, keys.subspan(from), entries[from - 1],
                                 [&](size_t k, EntryId id) { visit(from + k, id); });
      i += walked;
      if (walked > 0) batch = 1;
    }
  }
  return i;
}

size_t BlockIndex::match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const {
  return match(group, keys, entries, [entries](size_t i, EntryId id) { entries[i] = id; });
}

size_t BlockIndex::match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries,
                                 int32_t* slots) {
  bool overflow = false;
  const size_t found = match(group, keys, entries, [&](size_t i, EntryId id) {
    Entry& entry = table_[id];
    entries[i] = id;
    slots[i] = static_cast<int32_t>(entry.slot);
    overflow |= (++entry.meta & Entry::kMaxPins) == 0;
  });
  if (overflow) {
    for (size_t i = 0; i < found; ++i) --table_[entries[i]].meta;
    throw ContractError("match_and_pin: a block has " + std::to_string(Entry::kMaxPins) +
                        " leases; it cannot have more");
  }
  return found;
}

size_t BlockIndex::find(uint32_t group, std::span<const BlockKey> keys, bool ready_only,
                        EntryId* entries) const {
  const size_t known = find(group, keys, entries);
  if (!ready_only) return known;
  size_t ready = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (entries[i] != kNoEntry && !table_[entries[i]].is_ready_in(group)) entries[i] = kNoEntry;
    ready += entries[i] != kNoEntry;
  }
  return ready;
}

size_t BlockIndex::find(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const {
  group_at(group);
  std::array<uint32_t, 2 * kProbeBatch> hashes;  // of key k at k modulo the size
  size_t found = 0;
  size_t hashed = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kProbeBatch) {
    const size_t end = std::min(keys.size(), begin + kProbeBatch);
    for (const size_t ahead = std::min(keys.size(), end + kProbeBatch); hashed < ahead; ++hashed) {
      hashes[hashed % hashes.size()] = map_.hash(keys[hashed]);
      map_.prefetch(hashes[hashed % hashes.size()]);
    }
    for (size_t k = begin; k < end; ++k) {
      entries[k] = map_.candidate(hashes[k % hashes.size()]);
      if (entries[k] != kNoEntry) table_.prefetch(entries[k]);
    }
    for (size_t k = begin; k < end; ++k) {
      if (entries[k] == kNoEntry) continue;
      entries[k] = lookup(group, keys[k], hashes[k % hashes.size()]);
      found += entries[k] != kNoEntry;
    }
  }
  return found;
}

void BlockIndex::pin(std::span<const EntryId> entries, int32_t* slots) {
  // A pinned entry stays where it is in its list: relinking it would touch both of its neighbours, which lie
  // anywhere. An eviction that meets it takes it out.
  if (entries.empty()) return;
  const bool any_known = entries[0] >= table_.first() && entries[0] < table_.end();
  const uint32_t group = any_known ? table_[entries[0]].group() : 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryId id = entries[i];
    if (i + kPinAhead < entries.size()) table_.prefetch(entries[i + kPinAhead]);
    if (id < table_.first() || id >= table_.end() || !table_[id].is_ready_in(group) ||
        table_[id].pins() == Entry::kMaxPins) {
      for (size_t k = 0; k < i; ++k) --table_[entries[k]].meta;
      throw ContractError("pin: entry " + std::to_string(id) +
                          " is not a ready block of its group, or has too many leases");
    }
    ++table_[id].meta;
    slots[i] = static_cast<int32_t>(table_[id].slot);
  }
}

void BlockIndex::check_pinned(EntryId id) const {
  if (id >= table_.first() && id < table_.end() && table_[id].pins() > 0) return;
  throw ContractError("entry " + std::to_string(id) + " is not leased");
}

void BlockIndex::unpin(std::span<const EntryId> entries) {
  // From the end to the start, so that each chain is admitted before the one that precedes it in the request.
  for (size_t i = entries.size(); i > 0;) {
    const EntryId last = entries[--i];
    check_pinned(last);
    Entry& entry = table_[last];
    --entry.meta;
    if (entry.pins() > 0) continue;
    if (entry.state() != EntryState::kReady) {
      table_.unlink(last, last);
      free_entry(last);
      continue;
    }
    const uint32_t pinned_once = entry.meta + 1;
    EntryId first = last;
    while (i > 0 && table_[first].newer == entries[i - 1] && table_[entries[i - 1]].meta == pinned_once) {
      first = entries[--i];
      --table_[first].meta;
    }
    table_.unlink(first, last);
    groups_[entry.group()].policy->admit(table_, first, last);
  }
}

void BlockIndex::touch(std::span<const EntryId> entries) {
  const auto evictable = [&](EntryId id) {
    return id >= table_.first() && id < table_.end() && table_[id].state() == EntryState::kReady &&
           table_[id].pins() == 0;
  };
  for (size_t i = entries.size(); i > 0;) {
    const EntryId last = entries[--i];
    if (!evictable(last)) continue;
    EntryId first = last;
    while (i > 0 && table_[first].newer == entries[i - 1] && evictable(entries[i - 1])) first = entries[--i];
    table_.unlink(first, last);
    groups_[table_[last].group()].policy->admit(table_, first, last);
  }
}

void BlockIndex::make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                           std::vector<BlockKey>& evicted) {
  Group& owner = group_at(group);
  std::vector<EntryId> found(keys.size());
  const size_t unknown = keys.size() - find(group, keys, found.data());
  const size_t expected = std::min(unknown, max_new);
  const size_t free = owner.pool.free();
  if (expected <= free) return;

  // What the request has already must not be evicted to make room for the rest of it.
  std::vector<EntryId> held;
  if (unknown < keys.size()) {
    for (const EntryId id : found) {
      if (id != kNoEntry && table_[id].is_ready_in(group)) held.push_back(id);
    }
    std::vector<int32_t> slots(held.size());
    pin(held, slots.data());
  }
  evicted.reserve(expected - free);
  evict(owner, expected - free, evicted);
  unpin(held);
}

Inserted BlockIndex::insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new) {
  Group& owner = group_at(group);
  Inserted result;
  const size_t most = std::min(keys.size(), max_new);
  if (owner.pool.free() < most) make_room(group, keys, max_new, result.evicted);
  const size_t reserved = std::min(most, owner.pool.free());
  result.positions.reserve(reserved);
  result.entries.reserve(reserved);
  result.slots.reserve(reserved);

  std::array<uint32_t, 2 * kProbeBatch> hashes;  // of key k at k modulo the size
  std::vector<EntryId> known;                    // and ready
  EntryId at = owner.leased;
  bool full = false;
  for (size_t i = 0, hashed = 0; i < keys.size(); ++i) {
    for (const size_t ahead = std::min(keys.size(), i + hashes.size()); hashed < ahead; ++hashed) {
      hashes[hashed % hashes.size()] = map_.hash(keys[hashed]);
      map_.prefetch(hashes[hashed % hashes.size()]);
    }
    const uint32_t hash = hashes[i % hashes.size()];
    size_t place = 0;
    const EntryId found =
        map_.find_or_place(hash, [&](EntryId id) { return is_block(id, group, keys[i]); }, place);
    if (found != kNoEntry) {
      ++result.known;
      if (table_[found].state() == EntryState::kReady) known.push_back(found);
      // Known ones come in a row: the next but some are likely known too.
      const size_t next = i + kProbeBatch;
      if (next >= hashed) continue;
      const EntryId candidate = map_.candidate(hashes[next % hashes.size()]);
      if (candidate != kNoEntry) table_.prefetch(candidate);
      continue;
    }
    std::optional<uint32_t> slot;
    if (!full && result.positions.size() < max_new) slot = owner.pool.take();
    if (!slot) {
      full = true;
      ++result.dropped;
      continue;
    }
    const EntryId id = table_.allocate();
    if (id == kNoEntry) throw ContractError("insert: a slot is free but no entry is");
    Entry& entry = table_[id];
    entry.key = keys[i];
    entry.slot = *slot;
    entry.meta = Entry::pack(EntryState::kPending, group, 1);
    table_.link_after(at, id, id);
    at = id;
    map_.put(place, hash, id);
    result.positions.push_back(static_cast<uint32_t>(i));
    result.entries.push_back(id);
    result.slots.push_back(static_cast<int32_t>(*slot));
  }
  touch(known);
  return result;
}

void BlockIndex::finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published) {
  for (size_t i = 0; i < entries.size(); ++i) {
    check_pinned(entries[i]);
    Entry& entry = table_[entries[i]];
    published[i] = entry.state() == EntryState::kPending && ok[i];
    if (entry.state() != EntryState::kPending) continue;
    if (ok[i]) {
      entry.set_state(EntryState::kReady);
    } else {
      take_from_map(entries[i]);
    }
  }
  unpin(entries);
}

size_t BlockIndex::remove(std::span<const EntryId> entries, uint8_t* removed) {
  size_t count = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryId id = entries[i];
    const bool present =
        id >= table_.first() && id < table_.end() &&
        (table_[id].state() == EntryState::kReady || table_[id].state() == EntryState::kPending);
    removed[i] = present;
    if (!present) continue;
    ++count;
    take_from_map(id);
    if (table_[id].pins() == 0) {
      table_.unlink(id, id);
      free_entry(id);
    }
  }
  return count;
}

void BlockIndex::ready(std::span<const EntryId> entries, uint8_t* ready) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    ready[i] = entries[i] >= table_.first() && entries[i] < table_.end() &&
               table_[entries[i]].state() == EntryState::kReady;
  }
}

size_t BlockIndex::clear() {
  const size_t count = map_.size();
  map_.clear();
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    Entry& entry = table_[id];
    if (entry.state() != EntryState::kReady && entry.state() != EntryState::kPending) continue;
    entry.set_state(EntryState::kRemoved);
    if (entry.pins() > 0) continue;
    table_.unlink(id, id);
    free_entry(id);
  }
  return count;
}

void BlockIndex::copy_keys(std::span<const EntryId> entries, uint8_t* out) const {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < table_.first() || entries[i] >= table_.end()) {
      throw ContractError("copy_keys: entry " + std::to_string(entries[i]) + " was never in use");
    }
    std::memcpy(out + i * kKeyBytes, &table_[entries[i]].key, kKeyBytes);
  }
}

std::vector<BlockKey> BlockIndex::evict(uint32_t group, size_t count) {
  std::vector<BlockKey> evicted;
  evicted.reserve(std::min(count, size()));
  evict(group_at(group), count, evicted);
  return evicted;
}

void BlockIndex::evict(Group& group, size_t count, std::vector<BlockKey>& evicted) {
  // In batches, so that the misses on the map's places overlap.
  std::array<EntryId, kProbeBatch> victims;
  std::array<uint32_t, kProbeBatch> hashes;
  size_t gone = 0;
  while (gone < count) {
    const size_t wanted = std::min(kProbeBatch, count - gone);
    size_t chosen = 0;
    while (chosen < wanted) {
      const EntryId victim = group.policy->victim(table_);
      if (victim == kNoEntry) break;
      table_.unlink(victim, victim);
      if (table_[victim].pins() > 0) {
        // Met once for each time it was pinned at most, so this is part of the price of a pin.
        table_.link_after(group.leased, victim, victim);
        continue;
      }
      hashes[chosen] = map_.hash(table_[victim].key);
      map_.prefetch(hashes[chosen]);
      victims[chosen++] = victim;
    }
    for (size_t i = 0; i < chosen; ++i) {
      evicted.push_back(table_[victims[i]].key);
      erase(victims[i], hashes[i]);
      free_entry(victims[i]);
    }
    gone += chosen;
    if (chosen < wanted) break;
  }
  evictions_ += gone;
}

void BlockIndex::erase(EntryId id, uint32_t hash) {
  if (!map_.erase(hash, id)) {
    throw ContractError("entry " + std::to_string(id) + " is not in the map");
  }
  table_[id].set_state(EntryState::kRemoved);
}

void BlockIndex::take_from_map(EntryId id) { erase(id, map_.hash(table_[id].key)); }

void BlockIndex::free_entry(EntryId id) {
  groups_[table_[id].group()].pool.give_back(table_[id].slot);
  table_.release(id);
}

}  // namespace flexkv
