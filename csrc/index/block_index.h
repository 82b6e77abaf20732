// The index of one tier. It records which blocks the tier holds, the slot of each block, and which blocks are
// pinned and so cannot be evicted. A manager with a disk tier has one index for host memory and another for
// the disk, so that lookups in host memory are as fast as without a disk.
//
// The keys of all KV groups share one map. Each group either has its own slots and its own eviction order, or
// shares both with groups whose pages have the same size. A block may be present although the blocks before
// it in the request are not. An EntryId identifies an entry and stays valid while the entry is pinned. The
// class is not thread-safe. The time of a call is proportional to the number of blocks in its arguments,
// unless its comment says otherwise. Evicting one block takes O(1).
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
  kAbsent,   // the index has no entry for the block
  kReady,    // a lookup may hit the block
  kFilling,  // pending; the entry records the op that fills the block, so other requests may wait for that op
  // Pending, and no op is recorded: the block may never become ready, so no request may wait for it.
  kStoring,
  kExpired,  // ready but expired: lookups count the block as a miss, and the tier's owner has to remove it
};

// The run of blocks that `pin_run` found. `expired`: if the run ended at an expired block, the entry of that
// block; otherwise kNoEntry.
struct PinnedRun {
  size_t count = 0;
  EntryId expired = kNoEntry;
};

// The result of `insert`. `positions`, `entries` and `slots` have one element for each new block.
struct Inserted {
  std::vector<uint32_t> positions;  // index of each new block in the `keys` argument, in ascending order
  std::vector<EntryId> entries;     // entry of each new block, pending and pinned
  std::vector<int32_t> slots;       // slot of each new block
  std::vector<BlockKey> evicted;    // keys of the blocks evicted to free slots
  size_t known = 0;                 // number of keys that were already in the index
  size_t dropped = 0;               // number of unknown keys that got no slot
};

class BlockIndex {
 public:
  // `group_slots[g]`: the maximum number of slots that group g will ever have. `shared_with[g]`: the group
  // whose slots group g uses: either g itself or an earlier group. The vector is empty if no groups share
  // slots. If groups share slots, every comment of this class about a group's slots, evictions or coldest
  // blocks applies to all these groups together. Throws ConfigError if an argument is invalid, and
  // CapacityError if the index would be too large or there is not enough memory.
  BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {});
  BlockIndex(const std::vector<uint32_t>& group_slots, const std::string& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {})
      : BlockIndex(group_slots, policy_kind(policy), seed, shared_with) {}

  size_t groups() const { return class_of_.size(); }
  // Sets the listener. Calls it at once for each ready block, and from then on for every change of a slot's
  // block. O(entries). Throws ContractError if the groups have separate slots, because a slot number would
  // then be ambiguous.
  void tell(std::shared_ptr<SlotListener> listener);
  void grow(uint32_t group, uint32_t slots) { class_at(group).pool.grow(slots); }

  // Writes the entries of the leading ready blocks, that is, up to the first block that is not ready. Returns
  // the number of these blocks.
  size_t match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;

  // Does `match_prefix` and `pin` in one pass: adds a lease to each entry found and writes its slot.
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots);

  // Finds the leading blocks in the state `wanted`, adds a lease to each, and writes their entries and slots.
  // kReady finds blocks that are ready and not expired at `now_s`. kFilling finds blocks that a known op is
  // filling. Throws ContractError for any other state. If the blocks form a chain, this is as fast as
  // `match_and_pin`.
  PinnedRun pin_run(uint32_t group, std::span<const BlockKey> keys, Presence wanted, uint64_t now_s,
                    EntryId* entries, int32_t* slots);

  // Returns the state of a block. The caller passes the block's key, or the entry that `find` has just
  // returned for the key.
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

  // Returns how many of the leading entries are ready. Precondition: the caller has leased the entries.
  size_t count_ready(std::span<const EntryId> entries) const;

  // Returns how many of the leading pages that an earlier lookup found are still usable. `entries` has, for
  // each key, the entry that the lookup leased. A page is usable if its entry is ready, still leased, and
  // still holds the block of its key.
  size_t count_ready(uint32_t group, std::span<const BlockKey> keys, std::span<const EntryId> entries) const;

  // Adds a lease to an entry that `find` has just returned. Returns the entry's slot. Throws ContractError if
  // the entry already has the maximum number of leases.
  int32_t pin_one(EntryId entry);

  // Undoes leases that the caller has just taken. Unlike `unpin`, `take_back` does not change the order in
  // which blocks are evicted.
  void take_back(std::span<const EntryId> entries) {
    for (const EntryId id : entries) end_pin(id);
  }

  // Writes one entry per key: the entry of the key's block if the block is ready, otherwise kNoEntry. If
  // `ready_only` is false, also writes the entries of pending blocks. Returns how many entries were found.
  size_t find(uint32_t group, std::span<const BlockKey> keys, bool ready_only, EntryId* entries) const;

  // Returns the entries of a group, ready or pending, whose keys end with `mark`. O(entries).
  std::vector<EntryId> find_marked(uint32_t group, const KeyMark& mark) const;

  // Adds a lease to each entry and writes the entries' slots. Throws ContractError, and adds no lease, if an
  // entry is not ready, has too many leases, or is not in the group of the first entry.
  void pin(std::span<const EntryId> entries, int32_t* slots);

  // Does what `pin` does, for entries that an earlier lookup found for `keys`. Throws ContractError, and adds
  // no lease, if an entry no longer holds the ready block of its key, for example because that block was
  // evicted.
  void pin_found(uint32_t group, std::span<const BlockKey> keys, const EntryId* entries, int32_t* slots);

  // Does what `pin` does, but an entry may also be pending, provided that the op that fills it has leased it.
  // A request that waits for a pending block leases the block with this call. Other lookups miss the block
  // until it is ready.
  void pin_coming(std::span<const EntryId> entries, int32_t* slots);

  // Ends one lease on each entry. Entries that then have no lease become the most recently used ones, in the
  // order given. If an entry was removed while it was leased, and this was its last lease, the entry is
  // freed. `use` tells the eviction policy whether a request hit the blocks. A spare block stays spare unless
  // a request hit it.
  void unpin(std::span<const EntryId> entries, const Use& use = {});

  // Ends every lease except those in `leased`. If several leases of an entry are to be kept, `leased` lists
  // the entry as many times. Callers use this function after an exception that was thrown before they had
  // recorded their leases. Removes pending entries that then have no lease. Returns how many leases were
  // ended. O(entries). Throws ContractError, and changes nothing, if an entry occurs in `leased` more often
  // than it is leased.
  size_t keep_leases(std::span<const EntryId> leased);

  // Marks entries as just used, in the given order. The first `hits` entries count as hit by a request. Skips
  // entries that do not hold a ready block, entries that are leased, and spare blocks that do not count as
  // hit.
  void touch(std::span<const EntryId> entries, size_t hits = 0);

  // Makes a pending, pinned entry with a slot for each unknown key, but for at most `max_new` keys. Evicts
  // blocks if too few slots are free, but never a pinned block or one of `keys`. Known keys count as just
  // used.
  //
  // `filler` is the id of the op that fills the new entries; 0 if other requests must not wait for that op.
  // `leases` is the number of pins that each new entry gets, in addition to the pin that `finish` removes.
  // `spare` says whether the new blocks are spare, that is, useful only to requests that diverge at these
  // blocks from the request that stored them. While spare blocks use more than their share of the slots, they
  // are evicted before all other blocks, in the order in which they were stored. Otherwise, spare blocks are
  // evicted only if no other block can be evicted. A block stops being spare when a request hits it, or when
  // it is inserted again without `spare`. Inserting with `spare` does not change known blocks.
  Inserted insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new, int64_t filler = 0,
                  uint32_t leases = 0, bool spare = false);

  // Writes, for each entry, the id of the op that fills it. Writes 0 if no op is recorded or the entry is not
  // pending.
  void copy_fillers(std::span<const EntryId> entries, int64_t* out) const;

  // Sets the time at which each block expires, in Unix seconds; 0 means never. After that time, calls that
  // take `now_s` treat the block as a miss. Throws ContractError, and sets no expiry, if an entry is not in
  // use.
  void set_expiry(std::span<const EntryId> entries, const uint64_t* expiries);
  void copy_expiries(std::span<const EntryId> entries, uint64_t* out) const;

  // Writes 1 for each entry whose block is spare, and 0 for the others.
  void copy_spare(std::span<const EntryId> entries, uint8_t* out) const;

  // Evicts up to `count` blocks that are not pinned. Returns the keys of the evicted blocks.
  std::vector<BlockKey> evict(uint32_t group, size_t count);

  // Returns the group of each key that the last `insert`, `evict` or `retire` returned as evicted or removed.
  // Empty if no groups share slots, because all these keys then belong to the group in that call's argument.
  std::span<const uint32_t> gone_groups() const { return gone_groups_; }

  void copy_groups(std::span<const EntryId> entries, uint32_t* out) const;

  // Finishes the write of pending entries that `insert` made. Entries marked in `ok` become ready, and the
  // others are removed. An entry that was removed during its write stays removed. Removes the pin that
  // `insert` added to each entry. Writes to `published` which entries became ready, and adds `leases` leases
  // to each of these. Throws ContractError, and changes nothing, if an entry has no lease to remove or would
  // get too many leases.
  void finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published, uint32_t leases = 0);

  // Removes entries from the map, so that lookups no longer find them. An entry's slot is freed when the
  // entry's last lease ends. Writes 1 to `removed` for each entry that was in the map, and returns the number
  // of these entries.
  size_t remove(std::span<const EntryId> entries, uint8_t* removed);

  // Adds blocks that the tier held before this process started, as ready entries in the given slots. `keys`
  // start with the least recently used block. If several groups share the slots, one call adds the blocks of
  // all these groups, and `groups` has the group of each block. Skips a block if its slot is not available
  // yet or is retired. If two blocks have the same slot or the same key, only the more recently used one is
  // added. Marks the added blocks in `taken` and returns their number. Throws ContractError if any slot of
  // the group was already in use before the call.
  size_t adopt(uint32_t group, std::span<const BlockKey> keys, const int32_t* slots, uint8_t* taken,
               std::span<const uint32_t> groups = {});

  // Leases and returns up to `count` blocks that had no lease: those that would be evicted next, in the order
  // of eviction. The caller can then copy them to another tier before they are evicted. O(1) per block,
  // amortised over leases.
  std::vector<EntryId> take_coldest(uint32_t group, size_t count);

  // Permanently takes the slots marked in `gone` out of use, and removes the blocks in them. `gone` has one
  // flag for each slot that the group has or will ever have. Returns the keys of those removed blocks that
  // were ready. O(entries).
  std::vector<BlockKey> retire(uint32_t group, std::span<const uint8_t> gone);

  void copy_slots(std::span<const EntryId> entries, int32_t* out) const;
  void copy_pins(std::span<const EntryId> entries, uint32_t* out) const;

  // Writes 1 for each entry that lookups may hit, and 0 for the others.
  void ready(std::span<const EntryId> entries, uint8_t* ready) const;

  // Removes all entries from the map. Returns how many entries were in the map. O(entries).
  size_t clear();

  void copy_keys(std::span<const EntryId> entries, uint8_t* out) const;

  size_t size() const { return map_.size(); }
  size_t free_slots(uint32_t group) const { return class_at(group).pool.free(); }
  size_t up_slots(uint32_t group) const { return class_at(group).pool.up(); }
  // Returns how many slots are free or hold a block without leases. An `insert` of unknown keys finds slots
  // for at least this many keys, and possibly for more if slots were retired.
  size_t idle_slots(uint32_t group) const {
    const SizeClass& owner = class_at(group);
    return owner.pool.usable() - std::min<size_t>(owner.pool.usable(), owner.pinned);
  }
  // Returns the maximum number of slots that any group will ever have.
  uint32_t most_slots() const {
    uint32_t most = 0;
    for (const SizeClass& owner : classes_) most = std::max(most, owner.pool.max_slots());
    return most;
  }
  uint64_t evictions() const { return evictions_; }

  // Checks all list links, counts, places in the map and owners of slots. Also checks that each entry has as
  // many pins as it has occurrences in `pinned`. Throws ContractError, whose text says what is wrong.
  // O(entries).
  void check_integrity(std::span<const EntryId> pinned) const;

 private:
  // The slots of one group, or of several groups that share slots, with their eviction order.
  struct SizeClass {
    SlotPool pool;
    EntryId leased;  // head of the list of leased entries; some leased entries are still in other lists
    // Head of the list of spare blocks; the ids that follow are the heads of the policy's lists.
    EntryId spare;
    size_t spares = 0;  // number of spare blocks, pinned or not
    size_t pinned = 0;  // number of entries with at least one pin
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
  // Follows the chain that starts at entry `at`, as long as the chain's keys are equal to `keys` and its
  // entries are in `kState`. Calls `visit(i, id)` for each block; if visit() returns false, the walk ends
  // before that block. Returns the number of blocks before the end of the walk.
  template <EntryState kState, class Visit>
  size_t walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const;
  // Finds the leading keys whose entries are in `kState`, and returns the number of these keys. Calls
  // `visit(i, id)` as `walk` does; `visit` must write each entry to `entries`.
  template <EntryState kState, class Visit>
  size_t match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, Visit visit) const;
  // Calls `match`, adds a pin to each entry found, and stops at the first entry for which `passes(id)` is
  // false. Throws ContractError, and adds no pin, if an entry would have too many pins.
  template <EntryState kState, class Passes>
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots,
                       Passes passes);
  // Does what the public `find` with `ready_only` set to false does: finds entries that are ready or pending.
  size_t find(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;
  // Evicts blocks until there is a free slot for each unknown key, or for `max_new` of these keys if there
  // are more. Appends the keys of the evicted blocks to `evicted`. Stops early if nothing more can be
  // evicted.
  void make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                 std::vector<BlockKey>& evicted);
  bool is_leased(EntryId id) const {
    return id >= table_.first() && id < table_.end() && table_[id].pins() > 0;
  }
  void check_pinned(EntryId id) const {
    if (!is_leased(id)) throw ContractError("entry " + std::to_string(id) + " is not leased");
  }
  // Checks the arguments of `finish` before `finish` changes anything. Throws ContractError if they are
  // invalid. The index is unchanged afterwards.
  void check_finish(std::span<const EntryId> entries, const uint8_t* ok, uint32_t leases);
  void evict(SizeClass& owner, size_t count, std::vector<BlockKey>& evicted);
  // `add_pin` adds a pin to an entry, and `end_pin` removes one.
  void add_pin(EntryId id) {
    if (table_[id].pins() == 0) ++class_of(table_[id]).pinned;
    ++table_[id].meta;
  }
  void end_pin(EntryId id) {
    --table_[id].meta;
    if (table_[id].pins() == 0) --class_of(table_[id]).pinned;
  }
  // Unlinks and returns the entry to evict next; returns kNoEntry if there is no such entry. `spares`: the
  // number of spare blocks, not counting those that are already chosen as victims.
  EntryId take_victim(SizeClass& owner, size_t spares);
  // Links the chain first..last, which is in no list, into the list from which it can be evicted.
  // Precondition: either all blocks of the chain are spare, or none of them is.
  void admit(EntryId first, EntryId last, const Use& use);
  // Records the group of an entry that is being evicted or retired. `gone_groups` returns these groups.
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
  // Clears the values in the side arrays for an entry that is about to hold a new block.
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
  // Removes an entry from the map, given the hash of its key, and reports this to the listener and the
  // policy.
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
  // The policies' notes, indexed by entry; null if the policy has no notes. This member is declared before
  // `classes_`, so that the notes outlive the policies in `classes_`.
  std::unique_ptr<HugeArray<PolicyNote>> policy_notes_;
  std::vector<uint32_t> class_of_;  // index into `classes_` for each group
  std::vector<SizeClass> classes_;
  bool shares_ = false;  // whether any size class has several groups
  std::vector<uint32_t> gone_groups_;
  std::shared_ptr<SlotListener> listener_;
  uint64_t evictions_ = 0;
  // The following arrays are indexed by entry. Each array is made when it is first needed, so that it takes
  // no memory in an index that does not use it.
  std::unique_ptr<HugeArray<int64_t>> fillers_;  // id of the op that fills the entry; 0: none recorded
  // Time at which the block expires, in Unix seconds; 0: never.
  std::unique_ptr<HugeArray<uint64_t>> expiries_;
  std::unique_ptr<HugeArray<uint8_t>> spare_;  // whether the block is spare
};

}  // namespace flexkv
