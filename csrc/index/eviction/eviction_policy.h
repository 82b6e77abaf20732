// Which block goes when a slot is needed: the contract between the block index and its policies, one file a
// policy in this folder. One policy object serves one size class of one tier: a group, or groups that share
// slots. Lookups never call it: it hears of a block when the block's last lease ends, and when its slot is
// needed. It does not hear of a spare block before that is hit or offered as no spare one.
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

// What a policy keeps of one block, in a form of its own. It is 0 for a block that was never admitted: the
// index sets it so when an entry gets a new block.
using PolicyNote = uint64_t;

// What the index lends to a policy for as long as the policy lives.
struct PolicyRoom {
  EntryTable& table;
  EntryId first_head;  // of the policy's lists, which lie in a row
  // By entry, beside the entries rather than in them, so that lookups do not load them. Null unless the
  // policy's kind asks for it. All groups of an index share it.
  HugeArray<PolicyNote>* notes;
  const SlotPool& pool;  // of the class: how many blocks there can be
};

// How an entry came to be admitted.
struct Use {
  // A request found these blocks. False where they have just been stored, where a lease ends that was no
  // request's, and where the blocks of one request are only put in order.
  bool hit = false;
};

// Why a block is not in the index any more.
enum class Leaving : uint8_t {
  kEvicted,  // for its slot: it was right, and may be asked for again
  kRemoved,  // it was never published, it was wrong, or its owner took it back
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // An unlinked chain first..last, in the order of its request, becomes evictable: it was just used. The
  // policy links it into its lists. The more of a chain stays together, in its order, the faster lookups find
  // it.
  //
  // The index unlinks entries by itself when they are used again, removed or freed. A block that is leased
  // while it is in a list stays there.
  virtual void admit(EntryId first, EntryId last, const Use& use) = 0;

  // Unlinks the entry to evict next and returns it, or kNoEntry when the lists are empty. O(1), amortised
  // over what was admitted. The block may be leased, or removed and leased: the index then keeps the entry
  // apart, and admits a block again when its last lease ends.
  virtual EntryId take_victim() = 0;

  // The next two are called for kinds that follow blocks.
  //
  // Keys that were looked for in vain have an entry each from now on. `hashes` are those of their keys: 32
  // bits, secret, and the same for a key for as long as the index lives.
  virtual void missed(std::span<const EntryId> entries, std::span<const uint32_t> hashes) {
    (void)entries, (void)hashes;
  }

  // A block left the index; a removed one that is leased may still be in a list. Called once for each block,
  // but not for those of `clear`; of victims only after several of them were taken.
  virtual void gone(EntryId entry, uint32_t hash, Leaving why) { (void)entry, (void)hash, (void)why; }

  // All blocks leave, and none of them will come back under the same key.
  virtual void clear() {}

  // The policy's own invariants; those of the lists are the index's. Throws ContractError. O(entries).
  virtual void check_integrity() const {}
};

// A policy by name, and what it needs of the index.
struct PolicyKind {
  std::string name;
  size_t lists = 1;    // of the entry table; 1 to kMaxLists
  bool notes = false;  // a PolicyNote for each entry
  bool follows =
      false;  // `missed` and `gone` are called: an index whose policy has no use for them saves that
  std::unique_ptr<EvictionPolicy> (*make)(const PolicyRoom& room) = nullptr;

  static constexpr size_t kMaxLists = 4096;
};

// The kinds that a name can be given of, the default first.
std::span<const PolicyKind> policy_kinds();

// Throws ConfigError for an unknown name.
const PolicyKind& policy_kind(const std::string& name);

}  // namespace flexkv
