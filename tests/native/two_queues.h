// The smallest policy with two queues and ghosts (the remembered keys of evicted blocks). A new block goes to
// the short queue, from which it is soon evicted. A hit moves the block to the long queue. A block that is
// stored again after its eviction from the short queue also goes to the long queue.
#pragma once
#include <deque>
#include <memory>
#include <unordered_set>

#include "base/error.h"
#include "index/eviction/eviction_policy.h"

namespace flexkv {

class TwoQueues final : public EvictionPolicy {
 public:
  explicit TwoQueues(const PolicyRoom& room) : room_(room), notes_(*room.notes) {}

  void admit(EntryId first, EntryId last, const Use& use) override {
    // Links one block at a time, from the chain's end, so that each queue evicts the first block of the chain
    // last.
    for (EntryId at = last;;) {
      const EntryId newer = room_.table[at].newer;
      const PolicyNote was = notes_[at] & kQueue;
      const PolicyNote queue = use.hit || was == kLong ? kLong : kShort;
      uncount(at);
      ++count(queue);
      notes_[at] = queue | kCounted;
      room_.table.link_after(head(queue), at, at);
      if (at == first) return;
      at = newer;
    }
  }

  EntryId take_victim() override {
    const bool from_short = count(kShort) * kShortShare > room_.pool.up();
    for (const PolicyNote queue : {from_short ? kShort : kLong, from_short ? kLong : kShort}) {
      const EntryId oldest = room_.table[head(queue)].newer;
      if (oldest == head(queue)) continue;
      room_.table.unlink(oldest, oldest);
      uncount(oldest);  // uncounted here, because the index takes several victims before it calls gone()
      return oldest;
    }
    return kNoEntry;
  }

  void missed(std::span<const EntryId> entries, std::span<const uint32_t> hashes) override {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (ghosts_.erase(hashes[i]) > 0) notes_[entries[i]] = kLong;
    }
  }

  void gone(EntryId entry, uint32_t hash, Leaving why) override {
    uncount(entry);
    const PolicyNote was = notes_[entry];
    notes_[entry] = 0;
    if (was != kShort || why != Leaving::kEvicted) return;
    ghosts_.insert(hash);
    order_.push_back(hash);
    while (order_.size() > room_.pool.max_slots()) {
      ghosts_.erase(order_.front());
      order_.pop_front();
    }
  }

  void clear() override {
    for (EntryId id = 0; id < room_.table.size(); ++id) notes_[id] = 0;
    short_ = long_ = 0;
    ghosts_.clear();
    order_.clear();
  }

  void check_integrity() const override {
    for (const PolicyNote queue : {kShort, kLong}) {
      size_t linked = 0;
      for (EntryId at = room_.table[head(queue)].older; at != head(queue); at = room_.table[at].older) {
        if (notes_[at] == 0) continue;  // the block was removed while it was leased
        if (notes_[at] != (queue | kCounted)) throw ContractError("two queues: a block in the wrong one");
        ++linked;
      }
      if (linked != (queue == kShort ? short_ : long_)) throw ContractError("two queues: counted wrongly");
    }
  }

 private:
  // The parts of a note: the queue of the block (kShort or kLong, masked by kQueue), and kCounted if the
  // block is linked in its queue.
  static constexpr PolicyNote kShort = 1, kLong = 2, kQueue = 3, kCounted = 4;
  static constexpr size_t kShortShare = 4;  // the short queue may use one slot in this many

  EntryId head(PolicyNote queue) const { return room_.first_head + (queue == kLong ? 1 : 0); }
  size_t& count(PolicyNote queue) { return queue == kShort ? short_ : long_; }
  void uncount(EntryId entry) {
    if ((notes_[entry] & kCounted) == 0) return;
    notes_[entry] &= kQueue;
    --count(notes_[entry]);
  }

  PolicyRoom room_;
  HugeArray<PolicyNote>& notes_;
  size_t short_ = 0, long_ = 0;
  std::unordered_set<uint32_t> ghosts_;
  std::deque<uint32_t> order_;
};

inline PolicyKind two_queues_kind() {
  return {.name = "two queues",
          .lists = 2,
          .notes = true,
          .follows = true,
          .make = [](const PolicyRoom& room) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<TwoQueues>(room);
          }};
}

}  // namespace flexkv
