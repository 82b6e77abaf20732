// The index of one tier: which blocks it holds, in which slots, and which of them may not be evicted now. A
// manager with a disk has two indexes, so that blocks in host memory are found as fast as without a disk.
//
// Keys of all groups share one map. A group has slots and an order of eviction of its own, or shares them
// with groups whose pages have the same size. There is no closure invariant: a block may be present without
// the ones before it. An EntryId names an entry and stays valid while the entry is pinned. Not thread-safe.
// Every call costs O(blocks given); an eviction costs O(1).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/block_key.h"
#include "index/entry_table.h"
#include "index/eviction/eviction_policy.h"
#include "index/huge_array.h"
#include "index/key_map.h"
#include "index/slot_listener.h"
#include "index/slot_pool.h"

namespace flexkv {

// The state of a block in an index at a given time.
enum class Presence : uint8_t {
  kAbsent,   // no entry
  kReady,    // may be hit
  kFilling,  // pending, and a known op fills it
  kStoring,  // pending, with no filler: its content may never be published
  kExpired,  // ready, but expired: a miss, which its owner has to remove
};

// A run of blocks that `pin_run` found. `expired`: the expired entry that ended it, or kNoEntry.
struct PinnedRun {
  size_t count = 0;
  EntryId expired = kNoEntry;
};

// What `insert` did. `positions`, `entries` and `slots` describe the same blocks.
struct Inserted {
  std::vector<uint32_t> positions;  // index of each new block in the keys offered, ascending
  std::vector<EntryId> entries;     // the new blocks' entries: pending, pinned once
  std::vector<int32_t> slots;       // the new blocks' slots
  std::vector<BlockKey> evicted;    // keys of the blocks evicted to make room
  size_t known = 0;
  size_t dropped = 0;
};

class BlockIndex {
 public:
  // `group_slots[g]`: the most slots that group g will ever have. `shared_with[g]`: the group whose slots
  // group g shares, which is itself or an earlier one; empty if no groups share. Where groups share slots,
  // every statement below about a group's slots and about which of its blocks are evicted or cold applies to
  // those groups together. Throws ConfigError, CapacityError.
  BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {});
  BlockIndex(const std::vector<uint32_t>& group_slots, const std::string& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {})
      : BlockIndex(group_slots, policy_kind(policy), seed, shared_with) {}

  size_t groups() const { return class_of_.size(); }
  // Notifies `listener` of the ready blocks, and from now on of every change to a slot. Throws ContractError
  // if the groups have separate slots, because then one number does not identify a slot.
  void tell(std::shared_ptr<SlotListener> listener);
  void grow(uint32_t group, uint32_t slots) { class_at(group).pool.grow(slots); }

  // Writes the entries of the leading keys that are ready; returns how many.
  size_t match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;

  // Does `match_prefix` and `pin` in one pass: adds a lease to each entry found and writes its slot.
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots);

  // Adds a lease to each of the leading keys that are ready and have not expired, or (kFilling) that ops are
  // filling; writes their entries and slots. Finds chains as fast as `match_and_pin`.
  PinnedRun pin_run(uint32_t group, std::span<const BlockKey> keys, Presence wanted, uint64_t now_s,
                    EntryId* entries, int32_t* slots);

  // The state of one key, or of an entry that `find` has just returned.
  Presence presence(uint32_t group, const BlockKey& key, uint64_t now_s) const;
  Presence presence(EntryId entry, uint64_t now_s) const {
    if (!is_known(entry)) return Presence::kAbsent;
    switch (table_[entry].state()) {
      case EntryState::kReady:
        return is_expired(entry, now_s) ? Presence::kExpired : Presence::kReady;
      case EntryState::kPending:
        return fillers_ && (*fillers_)[entry] != 0 ? Presence::kFilling : Presence::kStoring;
      default:
        return Presence::kAbsent;
    }
  }

  // How many of the leading entries are ready. Precondition: the caller has leased them.
  size_t count_ready(std::span<const EntryId> entries) const;

  // Counts the leading ready entries, one per key, that the caller leased for `keys` earlier: an entry counts
  // only if it is still leased and still holds the block of its key. The caller may still promise the leading
  // part that counts.
  size_t count_ready(uint32_t group, std::span<const BlockKey> keys, std::span<const EntryId> entries) const;

  // Adds a lease to an entry that `find` has just returned; returns its slot. Throws ContractError if it has
  // too many.
  int32_t pin_one(EntryId entry);

  // Undoes leases that were just made: unlike `unpin`, it leaves the order of use as it is.
  void take_back(std::span<const EntryId> entries) {
    for (const EntryId id : entries) end_pin(id);
  }

  // Writes the entry of each key, ready or (unless `ready_only`) pending, else kNoEntry. Returns how many
  // were found.
  size_t find(uint32_t group, std::span<const BlockKey> keys, bool ready_only, EntryId* entries) const;

  // The entries of a group, ready or pending, whose keys end with `mark`. O(entries).
  std::vector<EntryId> find_marked(uint32_t group, const KeyMark& mark) const;

  // Adds a lease to each entry; all must be ready and of one group. Writes their slots. All or none.
  void pin(std::span<const EntryId> entries, int32_t* slots);

  // Leases entries that a lookup found. Each must still hold the block of its key: an entry that was evicted
  // and now holds another block is not leased.
  void pin_found(uint32_t group, std::span<const BlockKey> keys, const EntryId* entries, int32_t* slots);

  // `pin` for entries that are ready, or pending and leased by the op that fills them. It keeps a block that
  // is being filled for the requests that wait for it, although no other request may hit it.
  void pin_coming(std::span<const EntryId> entries, int32_t* slots);

  // Ends one lease on each entry. Entries without a lease then become the most recently used ones, in the
  // order given; those that were removed meanwhile are freed. `use` is for the policy. A spare block stays
  // one unless it was hit.
  void unpin(std::span<const EntryId> entries, const Use& use = {});

  // Ends every lease except those in `leased`, which names an entry once per lease. For a caller that an
  // exception interrupted before it had recorded its leases. Removes pending entries that are left without a
  // lease. Returns how many leases ended. Throws ContractError, and changes nothing, for an entry that is
  // leased less often than it is named.
  size_t keep_leases(std::span<const EntryId> leased);

  // Marks entries as just used, in the order given; a request hit the leading `hits` of them. This is a hint:
  // it skips ids that no longer name a ready block without leases, and spare blocks that were not hit.
  void touch(std::span<const EntryId> entries, size_t hits = 0);

  // Makes a pending, pinned entry with a slot for each unknown key, at most `max_new`, and evicts blocks if
  // slots are missing. Never evicts a pinned entry or one of `keys`. Known keys count as just used. `filler`:
  // the op that fills the new entries, 0 if there is none that others may wait for. `leases`: further pins on
  // each new entry, which `finish` keeps. `spare`: the new blocks are spare ones. While spare blocks have
  // more than their share of the slots, they are evicted before all others, in the order in which they were
  // stored; within their share they are not evicted. A block is no longer spare when a request hits it, or
  // when it is offered without `spare`. An offer of spare blocks does not change known blocks.
  Inserted insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new, int64_t filler = 0,
                  uint32_t leases = 0, bool spare = false);

  // Writes the filler of each pending entry, and 0 for all others.
  void copy_fillers(std::span<const EntryId> entries, int64_t* out) const;

  // Sets when the blocks expire (Unix seconds; 0: never). From then on they are misses for callers that give
  // a time. Throws ContractError, and sets none, if an entry is not in use.
  void set_expiry(std::span<const EntryId> entries, const uint64_t* expiries);
  void copy_expiries(std::span<const EntryId> entries, uint64_t* out) const;

  // Writes which entries are spare blocks.
  void copy_spare(std::span<const EntryId> entries, uint8_t* out) const;

  // Evicts up to `count` blocks that are not pinned; returns their keys.
  std::vector<BlockKey> evict(uint32_t group, size_t count);

  // The group of each key that the last `insert`, `evict` or `retire` returned as gone. Empty if no groups
  // share slots: all those keys then belong to the group of the call.
  std::span<const uint32_t> gone_groups() const { return gone_groups_; }

  void copy_groups(std::span<const EntryId> entries, uint32_t* out) const;

  // Ends the write of pending entries that `insert` made: those marked in `ok` become ready, the others are
  // removed. An entry that was removed meanwhile stays removed. Drops the pin of `insert`. Writes to
  // `published` which entries became ready; these get `leases` further leases. Throws ContractError, and
  // changes nothing, if an entry has no lease to drop or would get too many.
  void finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published, uint32_t leases = 0);

  // Takes entries out of the map; an entry's slot is freed when its last lease ends. Writes to `removed`
  // which entries were in the map, and returns how many.
  size_t remove(std::span<const EntryId> entries, uint8_t* removed);

  // Adds blocks that the tier held before this process started, as ready entries in the given slots; `keys`
  // start with the least recently used block. Precondition: none of the group's slots has been taken yet.
  // Skips a slot that is not up or was already named, and the older of two entries with the same key; marks
  // the blocks it added in `taken`, and returns their number. `groups`: the group of each block, if several
  // groups share the slots; one call adds the blocks of all of them.
  size_t adopt(uint32_t group, std::span<const BlockKey> keys, const int32_t* slots, uint8_t* taken,
               std::span<const uint32_t> groups = {});

  // Leases and returns up to `count` blocks without leases, the next victims first, so that they can be saved
  // elsewhere before they are evicted. O(1) per block, amortised over leases, like an eviction.
  std::vector<EntryId> take_coldest(uint32_t group, size_t count);

  // Permanently takes the slots marked in `gone` (one flag for each slot that the group will ever have) out
  // of use, and removes their blocks. Returns the keys of the blocks that were ready. O(entries).
  std::vector<BlockKey> retire(uint32_t group, std::span<const uint8_t> gone);

  void copy_slots(std::span<const EntryId> entries, int32_t* out) const;
  void copy_pins(std::span<const EntryId> entries, uint32_t* out) const;

  // Writes which entries may be hit.
  void ready(std::span<const EntryId> entries, uint8_t* ready) const;

  // Removes all entries. Returns how many were in the map.
  size_t clear();

  void copy_keys(std::span<const EntryId> entries, uint8_t* out) const;

  size_t size() const { return map_.size(); }
  size_t free_slots(uint32_t group) const { return class_at(group).pool.free(); }
  size_t up_slots(uint32_t group) const { return class_at(group).pool.up(); }
  // How many slots are free or hold a block without leases. `insert` finds room for at least this many
  // unknown keys, and perhaps for more if slots were retired.
  size_t idle_slots(uint32_t group) const {
    const SizeClass& owner = class_at(group);
    return owner.pool.usable() - std::min<size_t>(owner.pool.usable(), owner.pinned);
  }
  // The most slots that a group will ever have.
  uint32_t most_slots() const {
    uint32_t most = 0;
    for (const SizeClass& owner : classes_) most = std::max(most, owner.pool.max_slots());
    return most;
  }
  uint64_t evictions() const { return evictions_; }

  // Checks every link, count, map place and slot owner, and that each entry has as many pins as it occurs in
  // `pinned`. Throws ContractError, which names what is wrong. O(entries).
  void check_integrity(std::span<const EntryId> pinned) const;

 private:
  // The slots of one group, or of several that share them.
  struct SizeClass {
    SlotPool pool;
    EntryId leased;     // head of the list of pinned entries outside the other lists
    EntryId spare;      // head of the list of spare blocks; the policy's heads follow
    size_t spares = 0;  // spare blocks, pinned or not
    size_t pinned = 0;  // entries with a pin
    std::unique_ptr<EvictionPolicy> policy = nullptr;
  };

  SizeClass& class_at(uint32_t group);
  const SizeClass& class_at(uint32_t group) const;
  SizeClass& class_of(const Entry& entry) { return classes_[class_of_[entry.group()]]; }
  bool is_block(EntryId id, uint32_t group, const BlockKey& key) const {
    return table_[id].key == key && table_[id].group() == group;
  }
  bool is_block_in(EntryId id, EntryState state, uint32_t group, const BlockKey& key) const {
    return table_[id].key == key && table_[id].is_in(state, group);
  }
  EntryId lookup(uint32_t group, const BlockKey& key, uint32_t hash) const {
    return map_.find(hash, [&](EntryId id) { return is_block(id, group, key); });
  }
  // Follows the chain after `at` while its keys equal `keys` and its entries are in `kState`; returns the
  // number of blocks found. Calls `visit(i, id)` for each; if that returns false, the walk ends before this
  // block.
  template <EntryState kState, class Visit>
  size_t walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const;
  // Finds the leading keys whose entries are in `kState`. `visit` writes each entry to `entries`.
  template <EntryState kState, class Visit>
  size_t match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, Visit visit) const;
  // `match` that pins entries for as long as `passes(id)` holds. Throws ContractError, and pins none, if one
  // has too many leases.
  template <EntryState kState, class Passes>
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots,
                       Passes passes);
  // Like the public `find`, for entries that are ready or pending.
  size_t find(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;
  // Evicts until there is a free slot for each unknown key, or for `max_new` of them.
  void make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                 std::vector<BlockKey>& evicted);
  bool is_leased(EntryId id) const {
    return id >= table_.first() && id < table_.end() && table_[id].pins() > 0;
  }
  void check_pinned(EntryId id) const {
    if (!is_leased(id)) throw ContractError("entry " + std::to_string(id) + " is not leased");
  }
  // Checks in advance what `finish` would otherwise discover half-way. Throws ContractError; changes nothing.
  void check_finish(std::span<const EntryId> entries, const uint8_t* ok, uint32_t leases);
  void evict(SizeClass& owner, size_t count, std::vector<BlockKey>& evicted);
  // Add a pin to an entry, or end one.
  void add_pin(EntryId id) {
    if (table_[id].pins() == 0) ++class_of(table_[id]).pinned;
    ++table_[id].meta;
  }
  void end_pin(EntryId id) {
    --table_[id].meta;
    if (table_[id].pins() == 0) --class_of(table_[id]).pinned;
  }
  // Unlinks and returns the block to evict next, while `spares` blocks are spare; kNoEntry if there is none.
  EntryId take_victim(SizeClass& owner, size_t spares);
  // Makes an unlinked chain evictable. All of its blocks are spare, or none.
  void admit(EntryId first, EntryId last, const Use& use);
  // Records the group of an entry that leaves, for `gone_groups`.
  void note_gone(EntryId id) {
    if (shares_) gone_groups_.push_back(table_[id].group());
  }
  bool is_known(EntryId id) const { return id >= table_.first() && id < table_.end(); }
  bool is_spare(EntryId id) const { return spare_ && (*spare_)[id] != 0; }
  void end_spare(EntryId id) {
    if (!is_spare(id)) return;
    (*spare_)[id] = 0;
    --class_of(table_[id]).spares;
  }
  bool is_expired(EntryId id, uint64_t now_s) const {
    return expiries_ && (*expiries_)[id] != 0 && (*expiries_)[id] <= now_s;
  }
  // Resets the notes on an entry that is about to hold a new block.
  void clear_notes(EntryId id, int64_t filler) {
    if (fillers_) (*fillers_)[id] = filler;
    if (expiries_) (*expiries_)[id] = 0;
    if (policy_notes_) (*policy_notes_)[id] = 0;
  }
  void free_entry(EntryId id) {
    end_spare(id);
    class_of(table_[id]).pool.give_back(table_[id].slot);
    table_.release(id);
  }
  void take_from_map(EntryId id) { erase(id, map_.hash(table_[id].key), Leaving::kRemoved); }
  // The same for a caller that has the hash of its key.
  void erase(EntryId id, uint32_t hash, Leaving why) {
    if (!map_.erase(hash, id)) throw ContractError("entry " + std::to_string(id) + " is not in the map");
    if (listener_) listener_->withdraw(table_[id].slot);
    table_[id].set_state(EntryState::kRemoved);
    if (policy_follows_) class_of(table_[id]).policy->gone(id, hash, why);
  }

  void check_lists(std::vector<uint32_t>& seen) const;
  void check_list(uint32_t number, EntryId head, std::vector<uint32_t>& seen) const;
  void check_slots() const;

  size_t policy_lists_;
  bool policy_follows_;
  EntryTable table_;
  KeyMap map_;
  // The policies' notes on each entry, if they keep any. Made before the policies, and destroyed after them.
  std::unique_ptr<HugeArray<PolicyNote>> policy_notes_;
  std::vector<uint32_t> class_of_;  // by group
  std::vector<SizeClass> classes_;
  bool shares_ = false;  // some class has several groups
  std::vector<uint32_t> gone_groups_;
  std::shared_ptr<SlotListener> listener_;
  uint64_t evictions_ = 0;
  // Both are indexed by entry, and made when first used, so that an index without them pays nothing.
  // `fillers_`: the op that fills a pending entry. `expiries_`: the time from which an entry is a miss. 0:
  // none.
  std::unique_ptr<HugeArray<int64_t>> fillers_;
  std::unique_ptr<HugeArray<uint64_t>> expiries_;
  std::unique_ptr<HugeArray<uint8_t>> spare_;  // likewise: whether the entry's block is spare
};

}  // namespace flexkv
