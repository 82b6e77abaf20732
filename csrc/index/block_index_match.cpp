// The lookups of BlockIndex. They find the blocks of a chain through the chain's links. Blocks to which no
// link leads are looked up in the map, in batches whose memory accesses overlap.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "index/block_index.h"
#include "index/probe_batch.h"

namespace flexkv {
namespace {

// A walk along a chain follows a link only if the next entry's number differs by at most this much. The cache
// line of such an entry has probably been prefetched. Following a link to a more distant entry costs a full
// memory latency, four times as much as a probe that overlaps with others.
constexpr EntryId kNearEntries = 8;

bool near(EntryId from, EntryId to) { return to - from + kNearEntries <= 2 * kNearEntries; }

// A walk along a chain prefetches this many entries ahead, which are 16 cache lines. The CPU's own prefetcher
// stops at 4 KiB boundaries.
constexpr EntryId kWalkAhead = 32;

}  // namespace

template <EntryState kState, class Visit>
size_t BlockIndex::walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const {
  const uint32_t wanted = Entry::pack(kState, group, 0);
  size_t i = 0;
  while (i < keys.size()) {
    // A chain's entries usually have consecutive numbers. The loop guesses the next number instead of loading
    // it from the link, so that the CPU does not have to wait for the load. Key, state and group are compared
    // with one branch.
    for (; i < keys.size(); ++i, ++at) {
      const Entry& entry = table_[at];
      if (entry.older != at + 1) break;
      const Entry& next = (&entry)[1];
      const uint64_t differs = (next.key.low ^ keys[i].low) | (next.key.high ^ keys[i].high) |
                               ((next.meta & ~Entry::kMaxPins) ^ wanted);
      if (differs) break;
      __builtin_prefetch(&entry + kWalkAhead);
      if (!visit(i, at + 1)) return i;
    }
    if (i == keys.size()) break;
    const EntryId next = table_[at].older;
    if (!near(at, next) || !is_block_in(next, kState, group, keys[i]) || !visit(i, next)) break;
    ++i;
    at = next;
  }
  return i;
}

template <EntryState kState, class Visit>
size_t BlockIndex::match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries,
                         Visit visit) const {
  class_at(group);
  std::array<uint32_t, 2 * kProbeBatch> hashes;  // the hash of key k is at index k % hashes.size()
  size_t hashed = 0;
  size_t i = 0;
  size_t batch = 1;
  while (i < keys.size()) {
    // After the end of a chain, the loop first probes one key. If no chain starts at that key, it probes
    // batches of growing size, so that their memory accesses overlap. A batch of full size also prefetches
    // the places in the map that the next batch will read, so that memory accesses are always in flight.
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
      if (found == kNoEntry || !table_[found].is_in(kState, group)) return i;
      chained =
          batch == 1 || (i > begin && table_[entries[i - 1]].older == found && near(entries[i - 1], found));
      if (!visit(i, found)) return i;
      ++i;
    }
    batch = std::min(2 * batch, kProbeBatch);
    if (chained) {
      const size_t from = i;
      const size_t walked = walk<kState>(group, keys.subspan(from), entries[from - 1],
                                         [&](size_t k, EntryId id) { return visit(from + k, id); });
      i += walked;
      if (walked > 0) batch = 1;
    }
  }
  return i;
}

size_t BlockIndex::match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const {
  return match<EntryState::kReady>(group, keys, entries, [entries](size_t i, EntryId id) {
    entries[i] = id;
    return true;
  });
}

template <EntryState kState, class Passes>
size_t BlockIndex::match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries,
                                 int32_t* slots, Passes passes) {
  uint32_t before = 0;  // bitwise OR of the `meta` of all entries found, before their pins were added
  const size_t found = match<kState>(group, keys, entries, [&](size_t i, EntryId id) {
    if (!passes(id)) return false;
    Entry& entry = table_[id];
    entries[i] = id;
    slots[i] = static_cast<int32_t>(entry.slot);
    before |= entry.meta++;
    return true;
  });
  size_t fresh = found;  // number of entries that had no pin before, usually all entries found
  bool overflow = false;
  if ((before & Entry::kMaxPins) != 0) {
    fresh = 0;
    for (size_t i = 0; i < found; ++i) {
      const uint32_t pins = table_[entries[i]].pins();
      fresh += pins == 1;
      overflow |= pins == 0;
    }
  }
  if (fresh > 0) class_at(group).pinned += fresh;
  if (overflow) {
    take_back({entries, found});
    throw ContractError("match_and_pin: a block has " + std::to_string(Entry::kMaxPins) +
                        " leases; it cannot have more");
  }
  return found;
}

size_t BlockIndex::match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries,
                                 int32_t* slots) {
  return match_and_pin<EntryState::kReady>(group, keys, entries, slots, [](EntryId) { return true; });
}

PinnedRun BlockIndex::pin_run(uint32_t group, std::span<const BlockKey> keys, Presence wanted, uint64_t now_s,
                              EntryId* entries, int32_t* slots) {
  if (wanted == Presence::kFilling) {
    if (!fillers_) return {};
    const size_t count = match_and_pin<EntryState::kPending>(
        group, keys, entries, slots, [&](EntryId id) { return (*fillers_)[id] != 0; });
    return {count, kNoEntry};
  }
  if (wanted != Presence::kReady) throw ContractError("pin_run: only what is ready or filled can be pinned");
  if (!expiries_) return {match_and_pin(group, keys, entries, slots), kNoEntry};
  PinnedRun run;
  run.count = match_and_pin<EntryState::kReady>(group, keys, entries, slots, [&](EntryId id) {
    if (!is_expired(id, now_s)) return true;
    run.expired = id;
    return false;
  });
  return run;
}

Presence BlockIndex::presence(uint32_t group, const BlockKey& key, uint64_t now_s) const {
  class_at(group);
  return presence(lookup(group, key, map_.hash(key)), now_s);
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
  class_at(group);
  std::array<uint32_t, kHashBatch> hashes;
  size_t found = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kHashBatch) {
    const std::span<const BlockKey> batch = keys.subspan(begin, std::min(kHashBatch, keys.size() - begin));
    EntryId* const into = entries + begin;
    for (size_t i = 0; i < batch.size(); ++i) {
      hashes[i] = map_.hash(batch[i]);
      if (i < kProbeBatch) map_.prefetch(hashes[i]);
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      if (i + kProbeBatch < batch.size()) map_.prefetch(hashes[i + kProbeBatch]);
      into[i] = map_.candidate(hashes[i]);
      if (into[i] != kNoEntry) table_.prefetch(into[i]);
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      if (into[i] == kNoEntry) continue;
      into[i] = lookup(group, batch[i], hashes[i]);
      found += into[i] != kNoEntry;
    }
  }
  return found;
}

std::vector<EntryId> BlockIndex::find_marked(uint32_t group, const KeyMark& mark) const {
  class_at(group);
  std::vector<EntryId> found;
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    const Entry& entry = table_[id];
    const bool is_there = entry.is_ready_in(group) || entry.is_in(EntryState::kPending, group);
    if (is_there && has_mark(entry.key, mark)) found.push_back(id);
  }
  return found;
}

}  // namespace flexkv
