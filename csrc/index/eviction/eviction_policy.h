// The contract between a block index and its eviction policies, which choose the block to evict when a slot
// is needed. This folder has one pair of files per policy. One policy object serves one size class of one
// tier: a KV group, or several groups that share slots. The index calls the policy when a block's last lease
// ends, and when a slot is needed, but never during a lookup. Spare blocks are not in the policy's lists
// until a request hits them or they are stored again as ordinary blocks.
//
// docs/contributing/add-an-eviction-policy.md says how to add a policy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "index/entry_table.h"
#include "index/huge_array.h"
#include "index/slot_pool.h"

namespace flexkv {

// A policy's note about one block. Its meaning is private to the policy. The note is 0 until the policy first
// writes it, because the index sets it to 0 when an entry gets a new block.
using PolicyNote = uint64_t;

// The parts of the index that a policy uses. These parts outlive the policy.
struct PolicyRoom {
  EntryTable& table;
  EntryId first_head;  // head of the policy's first list; the next ids are the heads of its other lists
  // The policy's notes, indexed by entry; null if PolicyKind::notes is false. The notes are stored outside of
  // the entries, so that lookups do not load them into the cache. All size classes of an index share this
  // array.
  HugeArray<PolicyNote>* notes;
  // The slots of the policy's size class; `usable()` is the number of blocks that the class can hold.
  const SlotPool& pool;
};

// Says whether a request used the blocks that the index passes to EvictionPolicy::admit.
struct Use {
  // Whether a request hit these blocks. It is false in three cases: the blocks have just been stored, the
  // lease that ended did not belong to a request, or the call only restores the order of the blocks of a
  // request.
  bool hit = false;
};

// Why a block left the index.
enum class Leaving : uint8_t {
  kEvicted,  // the index evicted the block to free its slot; a request may need it again
  kRemoved,  // the block was never published, its content was wrong, or the tier's owner removed it
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The policy links the chain first..last, which is in no list, into its lists, so that the blocks can be
  // evicted. The blocks were just used, and are in the order in which their request has them. Lookups find
  // blocks faster if the policy keeps the entries of a chain together and in order.
  //
  // The index unlinks entries from the policy's lists when they are used again, removed or freed. A block
  // that gets a lease while it is in a list stays in the list.
  virtual void admit(EntryId first, EntryId last, const Use& use) = 0;

  // Unlinks the entry to evict next and returns it, or returns kNoEntry if the lists are empty. O(1),
  // amortised over the admitted entries. If the entry is leased, the index does not evict it, but moves it to
  // the index's list of leased entries. When the entry's last lease ends, the index calls `admit` for it,
  // unless the block has been removed in the meantime.
  virtual EntryId take_victim() = 0;

  // The index calls `missed` and `gone` only if PolicyKind::follows is set.
  //
  // The index calls `missed` after it has made entries for keys that it did not have. `hashes`: a 32-bit hash
  // of each key. The hash depends on a secret seed. In one index, the hash of a key is always the same.
  virtual void missed(std::span<const EntryId> entries, std::span<const uint32_t> hashes) {
    (void)entries, (void)hashes;
  }

  // The index calls `gone` once for each block that has left the index, but not for the blocks that `clear`
  // removes. The index may call take_victim() several times before it calls `gone` for the first of these
  // blocks. A block that was removed while it was leased may still be in one of the policy's lists.
  virtual void gone(EntryId entry, uint32_t hash, Leaving why) { (void)entry, (void)hash, (void)why; }

  // The index calls `clear` before it removes all blocks. The policy may discard its data about the blocks'
  // keys, because these keys will not be used again.
  virtual void clear() {}

  // Checks the policy's own invariants. (The index itself checks the links of the lists.) Throws
  // ContractError if an invariant does not hold. O(entries).
  virtual void check_integrity() const {}
};

// A kind of policy: its name, what it needs from the index, and how to make a policy object.
struct PolicyKind {
  std::string name;
  size_t lists = 1;      // number of lists that the policy uses, 1 to kMaxLists
  bool notes = false;    // whether the policy uses a PolicyNote for each entry
  bool follows = false;  // whether the index calls `missed` and `gone`
  std::unique_ptr<EvictionPolicy> (*make)(const PolicyRoom& room) = nullptr;

  static constexpr size_t kMaxLists = 4096;
};

// The kinds of policies that settings can choose by name. The first kind is the default.
std::span<const PolicyKind> policy_kinds();

// Returns the kind with this name. Throws ConfigError if there is no such kind.
const PolicyKind& policy_kind(const std::string& name);

}  // namespace flexkv
