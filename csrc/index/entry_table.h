// All entries of a block index, in circular doubly linked lists. An entry in use is in exactly one list, and
// can be unlinked without knowing which list that is. The list heads have the lowest ids; the ids of the
// entries follow.
#pragma once
#include <cstddef>
#include <string>

#include "base/error.h"
#include "index/entry.h"
#include "index/huge_array.h"

namespace flexkv {

class EntryTable {
 public:
  // Makes `lists` empty lists and `entries` free entries. Throws CapacityError if the total is too large.
  EntryTable(size_t lists, size_t entries) : entries_(checked(lists + entries)), heads_(lists) {
    for (EntryId head = 0; head < lists; ++head) entries_[head].newer = entries_[head].older = head;
    unused_from_ = static_cast<EntryId>(lists);
  }

  Entry& operator[](EntryId id) { return entries_[id]; }
  const Entry& operator[](EntryId id) const { return entries_[id]; }
  void prefetch(EntryId id) const { entries_.prefetch(id); }

  // The number of list heads plus the number of entries. Every id is smaller than this number.
  size_t size() const { return entries_.size(); }
  // The id of the first entry. Smaller ids are list heads.
  EntryId first() const { return static_cast<EntryId>(heads_); }
  // Entries whose ids are equal to or greater than this id were never in use.
  EntryId end() const { return unused_from_; }
  size_t free() const { return free_count_ + (entries_.size() - unused_from_); }
  EntryId free_head() const { return free_head_; }
  size_t free_listed() const { return free_count_; }

  // Returns an unlinked entry, or kNoEntry if all are in use. Prefers the entry that was released last. A
  // chain is evicted from its end, so its entries are then reused in ascending order, and the next chain is
  // contiguous in memory.
  EntryId allocate() {
    if (free_head_ != kNoEntry) {
      const EntryId id = free_head_;
      free_head_ = entries_[id].older;
      --free_count_;
      return id;
    }
    return unused_from_ < entries_.size() ? unused_from_++ : kNoEntry;
  }

  void release(EntryId id) {
    entries_[id].set_state(EntryState::kFree);
    entries_[id].older = free_head_;
    free_head_ = id;
    ++free_count_;
  }

  // Takes the chain first..last, linked through `older`, out of its list.
  void unlink(EntryId first, EntryId last) {
    const EntryId newer = entries_[first].newer;
    const EntryId older = entries_[last].older;
    entries_[newer].older = older;
    entries_[older].newer = newer;
  }

  // Inserts the unlinked chain first..last into the list right after `at`, on the older side. `at` is an
  // entry or a list head.
  void link_after(EntryId at, EntryId first, EntryId last) {
    const EntryId older = entries_[at].older;
    entries_[at].older = first;
    entries_[first].newer = at;
    entries_[last].older = older;
    entries_[older].newer = last;
  }

 private:
  static size_t checked(size_t size) {
    if (size < kNoEntry) return size;
    throw CapacityError("the block index was asked for " + std::to_string(size) +
                        " entries; allowed are fewer than 2**32 - 1");
  }

  HugeArray<Entry> entries_;
  size_t heads_;
  EntryId unused_from_ = 0;
  EntryId free_head_ = kNoEntry;
  size_t free_count_ = 0;
};

}  // namespace flexkv
