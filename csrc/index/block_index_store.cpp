// The calls that add blocks to BlockIndex: `insert` gives a block an entry and a slot, and `finish` makes the
// block visible after its write has finished.
#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "base/error.h"
#include "index/block_index.h"
#include "index/probe_batch.h"

namespace flexkv {
namespace {

void check_leases(const char* call, uint32_t leases) {
  if (leases <= Entry::kMaxPins / 2) return;
  throw ContractError(std::string(call) + ": " + std::to_string(leases) + " leases; allowed are 0 to " +
                      std::to_string(Entry::kMaxPins / 2));
}

}  // namespace

void BlockIndex::make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                           std::vector<BlockKey>& evicted) {
  SizeClass& owner = class_at(group);
  std::vector<EntryId> found(keys.size());
  const size_t unknown = keys.size() - find(group, keys, found.data());
  const size_t expected = std::min(unknown, max_new);
  const size_t free = owner.pool.free();
  if (expected <= free) return;

  // Pins those blocks of the request that are already in the index. Otherwise they could be evicted to free
  // slots for the request's other blocks.
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

Inserted BlockIndex::insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new, int64_t filler,
                            uint32_t leases, bool spare) {
  SizeClass& owner = class_at(group);
  check_leases("insert", leases);
  if (filler < 0) {
    throw ContractError("insert: filler " + std::to_string(filler) + "; allowed are 0 (none) and more");
  }
  if (filler != 0 && !fillers_) fillers_ = std::make_unique<HugeArray<int64_t>>(table_.size());
  if (spare && !spare_) spare_ = std::make_unique<HugeArray<uint8_t>>(table_.size());
  Inserted result;
  gone_groups_.clear();
  const size_t most = std::min(keys.size(), max_new);
  if (owner.pool.free() < most) make_room(group, keys, max_new, result.evicted);
  const size_t reserved = std::min(most, owner.pool.free());
  result.positions.reserve(reserved);
  result.entries.reserve(reserved);
  result.slots.reserve(reserved);

  std::array<uint32_t, 2 * kProbeBatch> hashes;  // the hash of key k is at index k % hashes.size()
  std::vector<EntryId> known;                    // ready entries of known keys, to be marked as just used
  // The new entries form a chain right behind the head of the leased list. `after` is the entry that follows
  // the head before the insert; after the insert, it follows the chain.
  EntryId at = owner.leased;
  const EntryId after = table_[at].older;
  bool full = false;
  const bool noted = fillers_ || expiries_ || policy_notes_;
  std::vector<uint32_t> missed;  // hashes of the new keys; filled only for a policy with `follows`
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
      if (!spare) {
        if (table_[found].state() == EntryState::kReady) known.push_back(found);
        end_spare(found);
      }
      // Known keys usually follow each other, so the key that is kProbeBatch keys ahead is probably known,
      // too.
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
    entry.newer = at;
    entry.older = after;
    entry.meta = Entry::pack(EntryState::kPending, group, 1 + leases);
    ++owner.pinned;
    if (listener_) listener_->begin(*slot);
    if (noted) clear_notes(id, filler);
    if (spare) {
      (*spare_)[id] = 1;
      ++owner.spares;
    }
    if (policy_follows_) missed.push_back(hash);
    table_[at].older = id;
    table_[after].newer = id;
    at = id;
    map_.put(place, hash, id);
    result.positions.push_back(static_cast<uint32_t>(i));
    result.entries.push_back(id);
    result.slots.push_back(static_cast<int32_t>(*slot));
  }
  if (!missed.empty()) owner.policy->missed(result.entries, missed);
  touch(known);
  return result;
}

void BlockIndex::check_finish(std::span<const EntryId> entries, const uint8_t* ok, uint32_t leases) {
  // Removes one pin per occurrence of an entry, then restores all removed pins. This detects an entry that
  // occurs more often than it is leased.
  std::string wrong;
  size_t ended = 0;
  while (ended < entries.size()) {
    const EntryId id = entries[ended];
    if (!is_leased(id)) {
      wrong = "entry " + std::to_string(id) + " is not leased, or not as often as it is named";
      break;
    }
    Entry& entry = table_[id];
    const bool gains = entry.state() == EntryState::kPending && ok[ended] != 0;
    if (gains && entry.pins() > Entry::kMaxPins - leases) {
      wrong = "entry " + std::to_string(id) + " has too many leases";
      break;
    }
    --entry.meta;
    ++ended;
  }
  while (ended > 0) ++table_[entries[--ended]].meta;
  if (!wrong.empty()) throw ContractError("finish: " + wrong);
}

void BlockIndex::finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published,
                        uint32_t leases) {
  check_leases("finish", leases);
  check_finish(entries, ok, leases);
  std::vector<EntryId> let_go;  // entries whose pin from `insert` is removed and not replaced by a lease
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = table_[entries[i]];
    const bool pending = entry.state() == EntryState::kPending;
    published[i] = pending && ok[i];
    if (published[i]) {
      entry.set_state(EntryState::kReady);
      if (listener_) listener_->publish(entry.slot, entry.group(), entry.key);
      if (leases > 0) {
        entry.meta += leases - 1;  // the pin from `insert` serves as one of the leases
        continue;
      }
    } else if (pending) {
      take_from_map(entries[i]);
    }
    let_go.push_back(entries[i]);
  }
  unpin(let_go);
}

}  // namespace flexkv
