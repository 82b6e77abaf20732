// The contract between the block index and its eviction policies, which choose the block to evict when a slot
// is needed. This folder has one file per policy. One policy object serves one size class of one tier: a
// group, or groups that share slots. Lookups never call it: the index calls it when a block's last lease
// ends, and when a slot is needed. The policy does not see a spare block until a request hits it or offers it
// as an ordinary one.
//
// To add a policy: docs/contributing/add-an-eviction-policy.md.
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

// A policy's note about one block; only the policy knows its meaning. It is 0 for a block that was never
// admitted: the index resets it when an entry gets a new block.
using PolicyNote = uint64_t;

// The parts of the index that a policy uses for as long as it lives.
struct PolicyRoom {
  EntryTable& table;
  EntryId first_head;  // head of the policy's first list; the heads are consecutive
  // Indexed by entry. Kept apart from the entries, so that lookups do not load the notes. Null unless the
  // policy's kind asks for notes. All groups of an index share the array.
  HugeArray<PolicyNote>* notes;
  const SlotPool& pool;  // of the size class; it tells how many blocks there can be
};

// Why an entry is admitted.
struct Use {
  // Whether a request hit these blocks. False if they have just been stored, if the lease that ended was not
  // a request's, or if the blocks of one request are only put in order.
  bool hit = false;
};

// Why a block left the index.
enum class Leaving : uint8_t {
  kEvicted,  // to free its slot; its content was right, and a request may ask for it again
  kRemoved,  // it was never published, it was wrong, or its owner took it back
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Makes an unlinked chain first..last evictable. It was just used, and is in the order of its request. The
  // policy links it into its lists. The more of a chain stays together and in order, the faster lookups find
  // it.
  //
  // The index itself unlinks entries when they are used again, removed or freed. A block that is leased while
  // it is in a list stays there.
  virtual void admit(EntryId first, EntryId last, const Use& use) = 0;

  // Unlinks the entry to evict next and returns it, or kNoEntry if the lists are empty. O(1), amortised over
  // the entries admitted. The block may be leased, or removed and leased: the index then keeps the entry
  // apart, and admits a block again when its last lease ends.
  virtual EntryId take_victim() = 0;

  // The index calls the next two only for kinds that follow blocks.
  // Keys that were not in the index have just been given these entries. `hashes` are the hashes of the keys:
  // 32 bits, secret, and the same for a key for as long as the index lives.
  virtual void missed(std::span<const EntryId> entries, std::span<const uint32_t> hashes) {
    (void)entries, (void)hashes;
  }

  // A block left the index; a removed one that is leased may still be in a list. Called once per block, but
  // not for those of `clear`; for victims only after several of them were taken.
  virtual void gone(EntryId entry, uint32_t hash, Leaving why) { (void)entry, (void)hash, (void)why; }

  // All blocks leave, and none of them will return under the same key.
  virtual void clear() {}

  // Checks the policy's own invariants; the index checks the lists. Throws ContractError. O(entries).
  virtual void check_integrity() const {}
};

// A policy by name, and what it needs from the index.
struct PolicyKind {
  std::string name;
  size_t lists = 1;      // of the entry table; 1 to kMaxLists
  bool notes = false;    // it keeps a PolicyNote for each entry
  bool follows = false;  // the index calls `missed` and `gone`
  std::unique_ptr<EvictionPolicy> (*make)(const PolicyRoom& room) = nullptr;

  static constexpr size_t kMaxLists = 4096;
};

// The kinds that can be chosen by name, the default first.
std::span<const PolicyKind> policy_kinds();

// Throws ConfigError for an unknown name.
const PolicyKind& policy_kind(const std::string& name);

}  // namespace flexkv
