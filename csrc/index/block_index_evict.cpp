// The calls that take blocks out of BlockIndex: `evict`, which frees slots; `remove`, which removes the given
// entries; and `clear`, which removes all entries.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "index/block_index.h"
#include "index/probe_batch.h"

namespace flexkv {
namespace {

// If spare blocks use more than one in this many slots, they are evicted before all other blocks. The value
// was measured with Mooncake's conversation trace, a model with full attention and five windows of 1,024
// tokens, and caches of 1 to 5 million tokens. With a share of one in 16, the hit ratio is 1.03 to 1.12 times
// the ratio without spare blocks. A share of one in 5 is no better. With a share of zero, the hit ratio is
// 1.02 to 1.17 times the ratio without spare blocks. But with a share of zero, a prefix that many requests
// have in common is hit only if everything fits in the cache.
constexpr size_t kSpareShare = 16;

}  // namespace

EntryId BlockIndex::take_victim(SizeClass& owner, size_t spares) {
  const EntryId oldest = table_[owner.spare].newer;
  const bool any = oldest != owner.spare;
  if (!any || spares <= owner.pool.up() / kSpareShare) {
    const EntryId victim = owner.policy->take_victim();
    if (victim != kNoEntry || !any) return victim;
  }
  table_.unlink(oldest, oldest);
  return oldest;
}

std::vector<BlockKey> BlockIndex::evict(uint32_t group, size_t count) {
  gone_groups_.clear();
  std::vector<BlockKey> evicted;
  evicted.reserve(std::min(count, size()));
  evict(class_at(group), count, evicted);
  return evicted;
}

void BlockIndex::evict(SizeClass& owner, size_t count, std::vector<BlockKey>& evicted) {
  std::array<EntryId, kHashBatch> victims;
  std::array<uint32_t, kHashBatch> hashes;
  size_t gone = 0;
  size_t spares = owner.spares;  // number of spare blocks that are not chosen as victims yet
  while (gone < count) {
    const size_t wanted = std::min(kHashBatch, count - gone);
    size_t chosen = 0;
    while (chosen < wanted) {
      const EntryId victim = take_victim(owner, spares);
      if (victim == kNoEntry) break;
      if (table_[victim].pins() > 0) {
        // This line moves a pinned entry out of the policy's list at most once per pin, so the amortised cost
        // of an eviction stays O(1).
        table_.link_after(owner.leased, victim, victim);
        continue;
      }
      spares -= is_spare(victim);
      hashes[chosen] = map_.hash(table_[victim].key);
      victims[chosen++] = victim;
    }
    for (size_t i = 0; i < std::min(kProbeBatch, chosen); ++i) map_.prefetch_erase(hashes[i]);
    for (size_t i = 0; i < chosen; ++i) {
      if (i + kProbeBatch < chosen) map_.prefetch_erase(hashes[i + kProbeBatch]);
      evicted.push_back(table_[victims[i]].key);
      note_gone(victims[i]);
      erase(victims[i], hashes[i], Leaving::kEvicted);
      free_entry(victims[i]);
    }
    gone += chosen;
    if (chosen < wanted) break;
  }
  evictions_ += gone;
}

size_t BlockIndex::remove(std::span<const EntryId> entries, uint8_t* removed) {
  size_t count = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const EntryId id = entries[i];
    const bool present =
        id >= table_.first() && id < table_.end() &&
        (table_[id].state() == EntryState::kReady || table_[id].state() == EntryState::kPending);
    removed[i] = present;
    if (!present) continue;
    ++count;
    take_from_map(id);
    if (table_[id].pins() == 0) {
      table_.unlink(id, id);
      free_entry(id);
    }
  }
  return count;
}

size_t BlockIndex::clear() {
  const size_t count = map_.size();
  map_.clear();
  if (listener_) listener_->clear();
  for (SizeClass& owner : classes_) owner.policy->clear();
  for (EntryId id = table_.first(); id < table_.end(); ++id) {
    Entry& entry = table_[id];
    if (entry.state() != EntryState::kReady && entry.state() != EntryState::kPending) continue;
    entry.set_state(EntryState::kRemoved);
    if (entry.pins() > 0) continue;
    table_.unlink(id, id);
    free_entry(id);
  }
  return count;
}

}  // namespace flexkv
