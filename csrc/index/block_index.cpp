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

// How many entries ahead list neighbours are fetched while single entries are relinked; the entries
// themselves at twice that. Source: the same sweep.
constexpr size_t kRelinkAhead = 8;

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

size_t BlockIndex::walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, EntryId* entries) const {
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
      entries[i] = at + 1;
    }
    if (i == keys.size()) break;
    const EntryId next = table_[at].older;
    if (!near(at, next) || !is_ready(next, group, keys[i])) break;
    entries[i++] = at = next;
  }
  return i;
}

size_t BlockIndex::match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const {
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
      entries[i++] = found;
    }
    batch = std::min(2 * batch, kProbeBatch);
    if (chained) {
      const size_t walked = walk(group, keys.subspan(i), entries[i - 1], entries + i);
      i += walked;
      if (walked > 0) batch = 1;
    }
  }
  return i;
}

size_t BlockIndex::find(uint32_t group, std::span<const BlockKey> keys, bool ready_only,
                        EntryId* entries) const {
  std::vector<uint32_t> hashes(keys.size());
  const size_t known = find(group, keys, hashes, entries);
  if (!ready_only) return known;
  size_t ready = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (entries[i] != kNoEntry && !table_[entries[i]].is_ready_in(group)) entries[i] = kNoEntry;
    ready += entries[i] != kNoEntry;
  }
  return ready;
}

size_t BlockIndex::find(uint32_t group, std::span<const BlockKey> keys, std::span<uint32_t> hashes,
                        EntryId* entries) const {
  group_at(group);
  size_t found = 0;
  size_t hashed = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kProbeBatch) {
    const size_t end = std::min(keys.size(), begin + kProbeBatch);
    for (const size_t ahead = std::min(keys.size(), end + kProbeBatch); hashed < ahead; ++hashed) {
      hashes[hashed] = map_.hash(keys[hashed]);
      map_.prefetch(hashes[hashed]);
    }
    for (size_t k = begin; k < end; ++k) {
      entries[k] = map_.candidate(hashes[k]);
      if (entries[k] != kNoEntry) table_.prefetch(entries[k]);
    }
    for (size_t k = begin; k < end; ++k) {
      if (entries[k] == kNoEntry) continue;
      entries[k] = lookup(group, keys[k], hashes[k]);
      found += entries[k] != kNoEntry;
    }
  }
  return found;
}

void BlockIndex::pin(std::span<const EntryId> entries, int32_t* slots) {
  if (entries.empty()) return;
  const size_t n = entries.size();
  const bool any_known = entries[0] >= table_.first() && entries[0] < table_.end();
  const uint32_t group = any_known ? table_[entries[0]].group() : 0;
  const uint32_t idle = Entry::pack(EntryState::kReady, group, 0);
  EntryId at = groups_[group].leased;
  for (size_t i = 0; i < n; ++i) {
    const EntryId first = entries[i];
    if (first < table_.first() || first >= table_.end() || !table_[first].is_ready_in(group) ||
        table_[first].pins() == Entry::kMaxPins) {
      unpin(entries.first(i));
      throw ContractError("pin: entry " + std::to_string(first) +
                          " is not a ready block of its group, or has too many leases");
    }
    slots[i] = static_cast<int32_t>(table_[first].slot);
    if (table_[first].meta++ != idle) {
      at = first;
      continue;
    }
    EntryId last = first;
    while (i + 1 < n && table_[last].older == entries[i + 1] && table_[entries[i + 1]].meta == idle) {
      last = entries[++i];
      ++table_[last].meta;
      slots[i] = static_cast<int32_t>(table_[last].slot);
    }
    if (last == first && i + 2 * kRelinkAhead < n) {
      table_.prefetch(entries[i + 2 * kRelinkAhead]);
      const Entry& ahead = table_[entries[i + kRelinkAhead]];
      table_.prefetch(ahead.newer);
      table_.prefetch(ahead.older);
    }
    table_.unlink(first, last);
    table_.link_after(at, first, last);
    at = last;
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

Inserted BlockIndex::insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new) {
  Group& owner = group_at(group);
  Inserted result;
  std::vector<EntryId> found(keys.size());
  std::vector<uint32_t> hashes(keys.size());
  const size_t found_count = find(group, keys, hashes, found.data());
  const size_t unknown = keys.size() - found_count;
  const size_t expected = std::min(unknown, max_new);
  result.positions.reserve(expected);
  result.entries.reserve(expected);
  result.slots.reserve(expected);
  result.evicted.reserve(expected - std::min(expected, owner.pool.free()));

  // What the request has already must not be evicted to make room for the rest of it.
  std::vector<EntryId> held;
  if (found_count > 0) {
    held.reserve(found_count);
    for (const EntryId id : found) {
      if (id != kNoEntry && table_[id].is_ready_in(group)) held.push_back(id);
    }
    std::vector<int32_t> slots(held.size());
    pin(held, slots.data());
  }

  if (expected > owner.pool.free()) evict(owner, expected - owner.pool.free(), result.evicted);
  EntryId at = owner.leased;
  bool full = false;
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t hash = hashes[i];
    // Fetched again: what the search fetched has been pushed out by the evictions and the rest of the keys.
    if (i + kProbeBatch < keys.size()) map_.prefetch(hashes[i + kProbeBatch]);
    // Looked up again where something was inserted since: the same key may have been offered twice.
    if (found[i] != kNoEntry || lookup(group, keys[i], hash) != kNoEntry) {
      ++result.known;
      continue;
    }
    std::optional<uint32_t> slot;
    if (!full && result.positions.size() < max_new) {
      slot = owner.pool.take();
    }
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
    map_.insert(hash, id);
    result.positions.push_back(static_cast<uint32_t>(i));
    result.entries.push_back(id);
    result.slots.push_back(static_cast<int32_t>(*slot));
  }
  unpin(held);
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

size_t BlockIndex::evict(Group& group, size_t count, std::vector<BlockKey>& evicted) {
  // In batches, so that the misses on the map's places overlap.
  std::array<EntryId, kProbeBatch> victims;
  size_t gone = 0;
  while (gone < count) {
    const size_t wanted = std::min(kProbeBatch, count - gone);
    size_t chosen = 0;
    while (chosen < wanted) {
      const EntryId victim = group.policy->victim(table_);
      if (victim == kNoEntry) break;
      table_.unlink(victim, victim);
      map_.prefetch(map_.hash(table_[victim].key));
      victims[chosen++] = victim;
    }
    for (size_t i = 0; i < chosen; ++i) {
      evicted.push_back(table_[victims[i]].key);
      take_from_map(victims[i]);
      free_entry(victims[i]);
    }
    gone += chosen;
    if (chosen < wanted) break;
  }
  evictions_ += gone;
  return gone;
}

void BlockIndex::take_from_map(EntryId id) {
  if (!map_.erase(map_.hash(table_[id].key), id)) {
    throw ContractError("entry " + std::to_string(id) + " is not in the map");
  }
  table_[id].set_state(EntryState::kRemoved);
}

void BlockIndex::free_entry(EntryId id) {
  groups_[table_[id].group()].pool.give_back(table_[id].slot);
  table_.release(id);
}

}  // namespace flexkv
