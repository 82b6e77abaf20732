// Least recently used first; of a chain used together, the block farthest from the start first, because a
// block is of no use without the ones before it.
#pragma once
#include "index/eviction_policy.h"

namespace flexkv {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(EntryId head) : head_(head) {}

  void admit(EntryTable& table, EntryId first, EntryId last) override {
    table.link_after(head_, first, last);
  }

  EntryId victim(const EntryTable& table) const override {
    const EntryId oldest = table[head_].newer;
    return oldest == head_ ? kNoEntry : oldest;
  }

  EntryId head() const override { return head_; }

 private:
  EntryId head_;
};

}  // namespace flexkv
