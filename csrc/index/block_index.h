// The index of one tier: which blocks are in it, where, and which may not be evicted now. A manager with a
// disk has two, so that what is in host memory is found as fast as without a disk.
//
// Keys of all groups share one map. Slots and the order of eviction are a group's own, or shared by groups
// whose pages have one size. There is no closure invariant: a block may be present without the ones before
// it. Entries are named by EntryId, which stays valid while it is pinned. Not thread-safe. Every call costs
// O(blocks given); an eviction costs O(1).
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
#include "index/slot_pool.h"

namespace flexkv {

// What an index knows of a block at a given time.
enum class Presence : uint8_t {
  kAbsent,   // no entry
  kReady,    // may be hit
  kFilling,  // pending, and an op that is named fills it
  kStoring,  // pending, with no filler: what it will hold may never be published
  kExpired,  // ready, and its time is over: a miss, whose owner has to remove it
};

// A run of blocks that `pin_run` found. `expired`: the entry that ended it because its time is over, or
// kNoEntry.
struct PinnedRun {
  size_t count = 0;
  EntryId expired = kNoEntry;
};

// What `insert` did. Arrays of the same length describe the same block.
struct Inserted {
  std::vector<uint32_t> positions;  // of the new blocks in the keys offered, ascending
  std::vector<EntryId> entries;     // of the new blocks: pending, pinned once
  std::vector<int32_t> slots;       // of the new blocks
  std::vector<BlockKey> evicted;    // keys that had to go
  size_t known = 0;
  size_t dropped = 0;
};

class BlockIndex {
 public:
  // `group_slots[g]`: the most slots group g will ever have. `shared_with[g]`: the group whose slots it
  // shares, itself or one before it; empty where none share. What is said below of a group's slots, of what
  // is evicted or cold among its blocks, is then said of all groups that share them. Throws ConfigError,
  // CapacityError.
  BlockIndex(const std::vector<uint32_t>& group_slots, const PolicyKind& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {});
  BlockIndex(const std::vector<uint32_t>& group_slots, const std::string& policy, uint64_t seed,
             const std::vector<uint32_t>& shared_with = {})
      : BlockIndex(group_slots, policy_kind(policy), seed, shared_with) {}

  size_t groups() const { return class_of_.size(); }
  void grow(uint32_t group, uint32_t slots) { class_at(group).pool.grow(slots); }

  // Entries of the leading keys that are ready; returns how many.
  size_t match_prefix(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;

  // The same and `pin` in one pass: one more lease on each entry found; writes their slots.
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots);

  // One more lease on each of the leading keys that are ready and have not expired, or (kFilling) that are
  // being filled by ops; writes their entries and slots. Finds chains as fast as `match_and_pin`.
  PinnedRun pin_run(uint32_t group, std::span<const BlockKey> keys, Presence wanted, uint64_t now_s,
                    EntryId* entries, int32_t* slots);

  // Of one key, or of an entry that `find` has just returned.
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

  // How many of the leading entries are ready. The caller leases them.
  size_t count_ready(std::span<const EntryId> entries) const;

  // The same, as far as they also are the blocks of `keys` and leased: of what a caller leased for these keys
  // before, the leading part that it may still promise. One entry a key.
  size_t count_ready(uint32_t group, std::span<const BlockKey> keys, std::span<const EntryId> entries) const;

  // One more lease on an entry that `find` has just returned; its slot. Throws ContractError when it has too
  // many.
  int32_t pin_one(EntryId entry);

  // Takes back leases that nothing has happened since: unlike `unpin` it leaves the order of use as it is.
  void take_back(std::span<const EntryId> entries) {
    for (const EntryId id : entries) end_pin(id);
  }

  // Entry of every key, ready or pending, or kNoEntry. Returns how many were found.
  size_t find(uint32_t group, std::span<const BlockKey> keys, bool ready_only, EntryId* entries) const;

  // One more lease on each entry, which must be ready; writes their slots. All or none.
  void pin(std::span<const EntryId> entries, int32_t* slots);

  // The same for entries that a lookup found, which must still be those of `keys`: what was evicted and given
  // to another block since is not leased under its number.
  void pin_found(uint32_t group, std::span<const BlockKey> keys, const EntryId* entries, int32_t* slots);

  // `pin` for entries that are ready, or pending and leased by who fills them: what is on its way is kept
  // for whoever waits for it, though nobody else may hit it.
  void pin_coming(std::span<const EntryId> entries, int32_t* slots);

  // Ends one lease on each. Entries without a lease become the most recently used ones, in the order given;
  // those that were removed meanwhile are freed. `use`: what the policy learns of it. A spare block stays one
  // unless it was hit.
  void unpin(std::span<const EntryId> entries, const Use& use = {});

  // Ends every lease but these, each named once a lease, for a caller that lost count: it broke off before it
  // had noted what it leased. Pending entries that nobody leases any more leave. Returns how many ended.
  // Throws ContractError, and changes nothing, for an entry that is leased less often than it is named.
  size_t keep_leases(std::span<const EntryId> leased);

  // Marks entries as just used, in the order given; the leading `hits` of them were found by a request. A
  // hint: an id that means nothing any more is passed over, and so is a spare block that was not hit.
  void touch(std::span<const EntryId> entries, size_t hits = 0);

  // Makes a pending, pinned entry with a slot for every unknown key, evicting where there is no free slot. At
  // most `max_new`; never evicts a pinned entry or one of `keys`. Known keys count as just used.
  // `filler`: the op that fills the new entries, 0 for none that others may wait for. `leases`: more pins on
  // each new entry, which `finish` leaves.
  // `spare`: where spare blocks have more than their share of the slots, they leave before all others, those
  // stored first first; within it they stay. A block is one no more when a request hits it, or it is offered
  // without `spare`. What is known already is left as it is by an offer of spare blocks.
  Inserted insert(uint32_t group, std::span<const BlockKey> keys, size_t max_new, int64_t filler = 0,
                  uint32_t leases = 0, bool spare = false);

  // Writes of each pending entry its filler, of all others 0.
  void copy_fillers(std::span<const EntryId> entries, int64_t* out) const;

  // From when on (Unix seconds, 0: never) the blocks are misses for those who ask with a time. All or none:
  // an entry that is not in use throws ContractError.
  void set_expiry(std::span<const EntryId> entries, const uint64_t* expiries);
  void copy_expiries(std::span<const EntryId> entries, uint64_t* out) const;

  // Writes which entries are spare blocks.
  void copy_spare(std::span<const EntryId> entries, uint8_t* out) const;

  // Evicts up to `count` blocks that are not pinned; returns their keys.
  std::vector<BlockKey> evict(uint32_t group, size_t count);

  // Of each block that the last `insert`, `evict` or `retire` took from the index its group. Empty in an
  // index in which no groups share slots: then it is the group of the call.
  std::span<const uint32_t> gone_groups() const { return gone_groups_; }

  void copy_groups(std::span<const EntryId> entries, uint32_t* out) const;

  // Ends the write of pending entries that `insert` made: those marked in `ok` become ready, the others are
  // removed. One removed since stays removed. Drops the pin of `insert`. Writes to `published` which became
  // ready; these get `leases` more. All or none: an entry without a lease to drop, or too many leases, throws
  // ContractError and changes nothing.
  void finish(std::span<const EntryId> entries, const uint8_t* ok, uint8_t* published, uint32_t leases = 0);

  // Takes entries out of the map; a slot is freed when its last lease ends. Writes to `removed` which were in
  // the map.
  size_t remove(std::span<const EntryId> entries, uint8_t* removed);

  // Blocks that were in the tier before this process: ready entries in the slots given, those used longest
  // ago first. Only for a group that has given no slot away. A slot that is not up or was named already, and
  // the older of two entries of a key, are passed over: `taken` says which were not. Returns how many were
  // taken. `groups`: of each block, where others share the group's slots; all of them at once.
  size_t adopt(uint32_t group, std::span<const BlockKey> keys, const int32_t* slots, uint8_t* taken,
               std::span<const uint32_t> groups = {});

  // Up to `count` blocks that nobody leases, those to be evicted first first, each leased once: what is about
  // to leave and is to be saved elsewhere before. O(1) a block, amortised over leases, like an eviction.
  std::vector<EntryId> take_coldest(uint32_t group, size_t count);

  // The slots marked in `gone` (one flag for each slot the group will ever have) are out of use for good;
  // their blocks are removed. Returns the keys of those that were ready. O(entries).
  std::vector<BlockKey> retire(uint32_t group, std::span<const uint8_t> gone);

  void copy_slots(std::span<const EntryId> entries, int32_t* out) const;
  void copy_pins(std::span<const EntryId> entries, uint32_t* out) const;

  // Writes which entries may be hit.
  void ready(std::span<const EntryId> entries, uint8_t* ready) const;

  // Removes every entry. Returns how many were in the map.
  size_t clear();

  void copy_keys(std::span<const EntryId> entries, uint8_t* out) const;

  size_t size() const { return map_.size(); }
  size_t free_slots(uint32_t group) const { return class_at(group).pool.free(); }
  size_t up_slots(uint32_t group) const { return class_at(group).pool.up(); }
  // Slots that are free or hold a block that nobody leases: an `insert` of so many unknown keys finds room
  // for each. In a pool with retired slots it may find more.
  size_t idle_slots(uint32_t group) const {
    const SizeClass& owner = class_at(group);
    return owner.pool.usable() - std::min<size_t>(owner.pool.usable(), owner.pinned);
  }
  uint64_t evictions() const { return evictions_; }

  // Checks every link, count, map place and slot owner, and that each entry's pins are the number of times it
  // occurs in `pinned`. Throws ContractError naming what is wrong. O(entries).
  void check_integrity(std::span<const EntryId> pinned) const;

 private:
  // The slots of one group, or of several that share them.
  struct SizeClass {
    SlotPool pool;
    EntryId leased;     // head of the list of pinned entries that the policy has let go
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
  // Follows the chain after `at` for as long as it agrees with `keys` and its entries are in `kState`;
  // returns how far. `visit(i, id)` is called for each block found, and ends the walk before it by returning
  // false.
  template <EntryState kState, class Visit>
  size_t walk(uint32_t group, std::span<const BlockKey> keys, EntryId at, Visit visit) const;
  // The leading keys whose entries are in `kState`. `visit` writes each to `entries`.
  template <EntryState kState, class Visit>
  size_t match(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, Visit visit) const;
  // `match` that pins what `passes(id)` lets through. All or none.
  template <EntryState kState, class Passes>
  size_t match_and_pin(uint32_t group, std::span<const BlockKey> keys, EntryId* entries, int32_t* slots,
                       Passes passes);
  // Like the public one, ready or pending.
  size_t find(uint32_t group, std::span<const BlockKey> keys, EntryId* entries) const;
  // Evicts until `keys` have a slot each, or `max_new` of those that are unknown.
  void make_room(uint32_t group, std::span<const BlockKey> keys, size_t max_new,
                 std::vector<BlockKey>& evicted);
  bool is_leased(EntryId id) const {
    return id >= table_.first() && id < table_.end() && table_[id].pins() > 0;
  }
  void check_pinned(EntryId id) const {
    if (!is_leased(id)) throw ContractError("entry " + std::to_string(id) + " is not leased");
  }
  // Throws what `finish` would throw half way; changes nothing.
  void check_finish(std::span<const EntryId> entries, const uint8_t* ok, uint32_t leases);
  void evict(SizeClass& owner, size_t count, std::vector<BlockKey>& evicted);
  // One pin more on an entry, or one less.
  void add_pin(EntryId id) {
    if (table_[id].pins() == 0) ++class_of(table_[id]).pinned;
    ++table_[id].meta;
  }
  void end_pin(EntryId id) {
    --table_[id].meta;
    if (table_[id].pins() == 0) --class_of(table_[id]).pinned;
  }
  // Unlinks the block to evict next, where so many are spare. kNoEntry where there is none.
  EntryId take_victim(SizeClass& owner, size_t spares);
  // An unlinked chain, all of it spare or none, becomes evictable.
  void admit(EntryId first, EntryId last, const Use& use);
  // Notes an entry that leaves for `gone_groups`.
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
  // What is noted of an entry's block starts anew.
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
  // The same, with the hash of its key.
  void erase(EntryId id, uint32_t hash, Leaving why) {
    if (!map_.erase(hash, id)) throw ContractError("entry " + std::to_string(id) + " is not in the map");
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
  // What the policies note of each entry, if they note anything. Made before them, and left after them.
  std::unique_ptr<HugeArray<PolicyNote>> policy_notes_;
  std::vector<uint32_t> class_of_;  // by group
  std::vector<SizeClass> classes_;
  bool shares_ = false;  // some class has several groups
  std::vector<uint32_t> gone_groups_;
  uint64_t evictions_ = 0;
  // By entry, made when first used: an index without them costs nothing. Of an entry that is pending the op
  // that fills it; of one in use the time from which on it is a miss. 0: none.
  std::unique_ptr<HugeArray<int64_t>> fillers_;
  std::unique_ptr<HugeArray<uint64_t>> expiries_;
  std::unique_ptr<HugeArray<uint8_t>> spare_;  // likewise: whether its block is a spare one
};

}  // namespace flexkv
