// The index of one tier. It records which blocks the tier holds, in which slots, and which blocks are pinned
// and so cannot be evicted. A manager with a disk tier has one index for host memory and another for the
// disk, so that lookups in host memory are as fast as without a disk.
//
// The keys of all KV groups share one map. Each group has its own slots and eviction order, or shares both
// with groups whose pages have the same size. A block may be present although the blocks before it in the
// request are not. An EntryId identifies an entry and stays valid while the entry is pinned. The class is not
// thread-safe. A call takes time proportional to the number of blocks given, unless its comment says
// otherwise. Evicting one block takes O(1).
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
  kFilling,  // pending; the entry records the op that fills it, so other requests may wait for that op
  kStoring,  // pending, and no op is recorded: the block may never become ready, so no request may wait for
             // it
  kExpired,  // ready but expired: lookups count it as a miss, and the tier's owner has to remove it
};

// The run of blocks that `pin_run` found. `expired`: the expired entry at which the run ended; kNoEntry if it
// ended for another reason.
struct PinnedRun {
  size_t count = 0;
  EntryId expired = kNoEntry;
};

// The result of `insert`. `positions`, `entries` and `slots` have one element for each new block.
struct Inserted {
  std::vector<uint32_t> positions;  // index of each new block in the `keys` argument, ascending
  std::vector<EntryId> entries;     // entry of each new block, pending and pinned
  std::vector<int32_t> slots;       // slot of each new block
  std::vector<BlockKey> evicted;    // keys of the blocks evicted to free slots
  size_t known = 0;                 // number of keys that were already in the index
  size_t dropped = 0;               // number of unknown keys that got no slot
};

class BlockIndex {
 public:
  // `group_slots[g]`: the maximum number of slots that group g will ever have. `shared_with[g]`: the group
  // whose slots group g uses, which is g itself or an earlier group; the vector is empty if no groups share
  // slots. If groups share slots, every comment of this class about a group's slots, evictions or coldest
  // blocks applies to these groups together. Throws ConfigError if an argument is invalid, CapacityError if
  // the index would be too large or gets no memory.
  BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {});
  BlockIndex(const std::vector<uint32_t>& group_slots, const std::string& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {})
      : BlockIndex(group_slots, policy_kind(policy), seed, shared_with) {}

  size_t groups() const { return class_of_.size(); }
  // Sets the listener: calls it at once for each ready block, and later for every change to a slot.
  // O(entries). Throws ContractError if the groups have separate slots, because a slot number would then be
  // ambiguous.
  void tell(std::shared_ptr<SlotListener> listener);
  void grow(uint32_t group, uint32_t slots) { class_at(group).pool.grow(slots); }

  // Writes the entries of the leading blocks that are ready, up to the first one that is not. Returns their
  // number.
  size_t match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;

  // Does `match_prefix` and `pin` in one pass: adds a lease to each entry found and writes its slot.
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots);

  // Finds the leading blocks in the state `wanted`, adds a lease to each, and writes their entries and slots.
  // kReady finds blocks that are ready and not expired at `now_s`. kFilling finds blocks that a known op is
  // filling. Throws ContractError for any other state. As fast as `match_and_pin` along chains.
  PinnedRun pin_run(uint32_t group, std::span<const BlockKey> keys, Presence wanted, uint64_t now_s,
                    EntryId* entries, int32_t* slots);

  // Returns the state of a block. The caller gives the block's key, or the entry that `find` has just
  // returned for this key.
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

  // Returns how many leading entries are ready. Precondition: the caller has leased the entries.
  size_t count_ready(std::span<const EntryId> entries) const;

  // Returns how many leading pages of an earlier lookup are still usable. `entries` has the entry that the
  // lookup leased for each key. A page is usable if its entry is ready, still leased, and still holds the
  // block of its key.
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

  // Like `pin`, for entries that an earlier lookup found for `keys`. Throws ContractError, and adds no lease,
  // if an entry no longer holds the ready block of its key, for example because that block was evicted.
  void pin_found(uint32_t group, std::span<const BlockKey> keys, const EntryId* entries, int32_t* slots);

  // Like `pin`, but an entry may also be pending if the op that fills it has leased it. A request that waits
  // for a pending block leases the block with this call. Other lookups miss the block until it is ready.
  void pin_coming(std::span<const EntryId> entries, int32_t* slots);

  // Ends one lease on each entry. Entries that then have no lease become the most recently used ones, in the
  // order given. If an entry was removed while it was leased, and this was its last lease, the entry is
  // freed. `use` says whether a request hit the blocks, for the eviction policy. A spare block stays spare
  // unless it was hit.
  void unpin(std::span<const EntryId> entries, const Use& use = {});

  // Ends every lease except those in `leased`, which lists an entry once for each of its leases to keep. A
  // caller uses this after an exception that came before the caller had recorded its leases. Removes pending
  // entries that then have no lease. Returns how many leases ended. O(entries). Throws ContractError, and
  // changes nothing, if an entry occurs in `leased` more often than it is leased.
  size_t keep_leases(std::span<const EntryId> leased);

  // Marks entries as just used, in the order given; a request hit the first `hits` of them. Skips entries
  // that do not hold a ready block, entries that are leased, and spare blocks that were not hit.
  void touch(std::span<const EntryId> entries, size_t hits = 0);

  // Makes a pending, pinned entry with a slot for each unknown key, but for at most `max_new` keys. Evicts
  // blocks if too few slots are free, but never a pinned block or one of `keys`. Known keys count as just
  // used.
  //
  // `filler` is the id of the op that fills the new entries; 0 if other requests must not wait for that op.
  // `leases` is the number of pins that each new entry gets in addition to the pin that `finish` drops.
  // `spare` says whether the new blocks are spare, that is, useful only to requests that diverge at these
  // blocks from the request that stored them. While spare blocks have more than their share of the slots,
  // they are evicted before all other blocks, in the order in which they were stored. Otherwise they are
  // evicted only if no other block can be evicted. A block stops being spare when a request hits it, or when
  // it is inserted again without `spare`. Inserting with `spare` does not change known blocks.
  Inserted insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new, int64_t filler = 0,
                  uint32_t leases = 0, bool spare = false);

  // Writes for each entry the id of the op that fills it; 0 if no op is recorded or the entry is not pending.
  void copy_fillers(std::span<const EntryId> entries, int64_t* out) const;

  // Sets the time at which each block expires, in Unix seconds; 0 means never. After that time, calls that
  // take `now_s` treat the block as a miss. Throws ContractError, and sets no time, if an entry is not in
  // use.
  void set_expiry(std::span<const EntryId> entries, const uint64_t* expiries);
  void copy_expiries(std::span<const EntryId> entries, uint64_t* out) const;

  // Writes 1 for each entry whose block is spare, and 0 for the others.
  void copy_spare(std::span<const EntryId> entries, uint8_t* out) const;

  // Evicts up to `count` blocks that are not pinned. Returns the keys of the evicted blocks.
  std::vector<BlockKey> evict(uint32_t group, size_t count);

  // The group of each key that the last `insert`, `evict` or `retire` returned as evicted or lost. Empty if
  // no groups share slots, because all these keys then belong to the group given in that call.
  std::span<const uint32_t> gone_groups() const { return gone_groups_; }

  void copy_groups(std::span<const EntryId> entries, uint32_t* out) const;

  // Finishes the write of pending entries that `insert` made. Entries marked in `ok` become ready, and the
  // others are removed. An entry that was removed during its write stays removed. Drops the pin that `insert`
  // set on each entry. Writes to `published` which entries became ready, and adds `leases` leases to each of
  // these. Throws ContractError, and changes nothing, if an entry has no lease to drop or would get too many
  // leases.
  void finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published, uint32_t leases = 0);

  // Removes entries from the map, so that lookups no longer find them. An entry's slot is freed when the
  // entry's last lease ends. Writes 1 to `removed` for each entry that was in the map, and returns the number
  // of these entries.
  size_t remove(std::span<const EntryId> entries, uint8_t* removed);

  // Adds blocks that the tier held before this process started, as ready entries in the given slots. `keys`
  // start with the least recently used block. If several groups share the slots, one call adds the blocks of
  // all these groups, and `groups` has the group of each block. Skips blocks whose slot is not up or is
  // retired. If two blocks have the same slot or the same key, only the more recently used one is added.
  // Marks the added blocks in `taken` and returns their number. Throws ContractError if any slot of the group
  // was already in use before the call.
  size_t adopt(uint32_t group, std::span<const BlockKey> keys, const int32_t* slots, uint8_t* taken,
               std::span<const uint32_t> groups = {});

  // Leases and returns up to `count` blocks that had no lease, in the order of eviction. The caller can then
  // copy them to another tier before they are evicted. O(1) per block, amortised over leases.
  std::vector<EntryId> take_coldest(uint32_t group, size_t count);

  // Permanently takes the slots marked in `gone` out of use, and removes the blocks in them. `gone` has one
  // flag for each slot that the group has or will get. Returns the keys of the removed blocks that were
  // ready. O(entries).
  std::vector<BlockKey> retire(uint32_t group, std::span<const uint8_t> gone);

  void copy_slots(std::span<const EntryId> entries, int32_t* out) const;
  void copy_pins(std::span<const EntryId> entries, uint32_t* out) const;

  // Writes 1 for each entry that lookups may hit, and 0 for the others.
  void ready(std::span<const EntryId> entries, uint8_t* ready) const;

  // Removes all entries. Returns how many entries were in the map. O(entries).
  size_t clear();

  void copy_keys(std::span<const EntryId> entries, uint8_t* out) const;

  size_t size() const { return map_.size(); }
  size_t free_slots(uint32_t group) const { return class_at(group).pool.free(); }
  size_t up_slots(uint32_t group) const { return class_at(group).pool.up(); }
  // How many slots are free or hold a block without leases. An `insert` of unknown keys finds slots for at
  // least this many keys, and possibly for more if slots were retired.
  size_t idle_slots(uint32_t group) const {
    const SizeClass& owner = class_at(group);
    return owner.pool.usable() - std::min<size_t>(owner.pool.usable(), owner.pinned);
  }
  // The maximum number of slots that a group will ever have.
  uint32_t most_slots() const {
    uint32_t most = 0;
    for (const SizeClass& owner : classes_) most = std::max(most, owner.pool.max_slots());
    return most;
  }
  uint64_t evictions() const { return evictions_; }

  // Checks all list links, counts, map places and slot owners, and that the number of each entry's pins is
  // the number of its occurrences in `pinned`. Throws ContractError, which says what is wrong. O(entries).
  void check_integrity(std::span<const EntryId> pinned) const;

 private:
  // The slots of one group, or of several groups that share slots, with their eviction order.
  struct SizeClass {
    SlotPool pool;
    EntryId leased;     // head of the list of leased entries; some leased entries are in other lists
    EntryId spare;      // head of the list of spare blocks; the heads of the policy's lists follow
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
  // Follows the chain that starts at entry `at`, while the chain's keys equal `keys` and its entries are in
  // `kState`. Calls `visit(i, id)` for each block; if that returns false, the walk ends before this block.
  // Returns the number of blocks before the end of the walk.
  template <EntryState kState, class Visit>
  size_t walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const;
  // Finds the leading keys whose entries are in `kState` and returns their number. Calls `visit(i, id)` as
  // `walk` does; `visit` must write each entry to `entries`.
  template <EntryState kState, class Visit>
  size_t match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, Visit visit) const;
  // Calls `match`, adds a pin to each entry found, and stops at the first entry for which `passes(id)` is
  // false. Throws ContractError, and adds no pin, if an entry would have too many pins.
  template <EntryState kState, class Passes>
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots,
                       Passes passes);
  // The public `find` with `ready_only` false: finds entries that are ready or pending.
  size_t find(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;
  // Evicts blocks until there is a free slot for each unknown key, or for `max_new` of these keys. Appends
  // the keys of the evicted blocks to `evicted`. Stops early if nothing more can be evicted.
  void make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                 std::vector<BlockKey>& evicted);
  bool is_leased(EntryId id) const {
    return id >= table_.first() && id < table_.end() && table_[id].pins() > 0;
  }
  void check_pinned(EntryId id) const {
    if (!is_leased(id)) throw ContractError("entry " + std::to_string(id) + " is not leased");
  }
  // Checks the arguments of `finish` before `finish` changes anything. Throws ContractError if they are
  // invalid. Leaves the index unchanged.
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
  // Unlinks and returns the entry to evict next; kNoEntry if no entry is left to evict. `spares`: the number
  // of spare blocks, without the spare blocks that are already chosen as victims.
  EntryId take_victim(SizeClass& owner, size_t spares);
  // Makes an unlinked chain first..last evictable. Precondition: either all blocks of the chain are spare, or
  // none is.
  void admit(EntryId first, EntryId last, const Use& use);
  // Records the group of an entry that is being evicted or retired, for `gone_groups`.
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
  // Resets what the side arrays record about an entry that is about to hold a new block.
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
  // The policies' notes, indexed by entry; null if the policy keeps none. They are declared before
  // `classes_`, so that they outlive the policies in `classes_`.
  std::unique_ptr<HugeArray<PolicyNote>> policy_notes_;
  std::vector<uint32_t> class_of_;  // index into `classes_` for each group
  std::vector<SizeClass> classes_;
  bool shares_ = false;  // whether some size class has several groups
  std::vector<uint32_t> gone_groups_;
  std::shared_ptr<SlotListener> listener_;
  uint64_t evictions_ = 0;
  // The following arrays are indexed by entry. Each is made when it is first needed, so that an index that
  // does not use it needs no memory for it.
  std::unique_ptr<HugeArray<int64_t>> fillers_;    // id of the op that fills the entry; 0: none recorded
  std::unique_ptr<HugeArray<uint64_t>> expiries_;  // when the block expires, in Unix seconds; 0: never
  std::unique_ptr<HugeArray<uint8_t>> spare_;      // whether the block is spare
};

}  // namespace flexkv
