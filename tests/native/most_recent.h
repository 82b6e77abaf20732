// The smallest policy: it evicts the most recently used block. docs/contributing/add-an-eviction-policy.md
// quotes it.
#pragma once
#include <memory>

#include "index/eviction/eviction_policy.h"

namespace flexkv {

class MostRecent final : public EvictionPolicy {
 public:
  explicit MostRecent(const PolicyRoom& room) : table_(room.table), head_(room.first_head) {}

  // Links the blocks behind the head in the request's order, so that a chain stays together for lookups.
  void admit(EntryId first, EntryId last, const Use&) override { table_.link_after(head_, first, last); }

  EntryId take_victim() override {
    const EntryId newest = table_[head_].older;
    if (newest == head_) return kNoEntry;
    table_.unlink(newest, newest);
    return newest;
  }

 private:
  EntryTable& table_;
  EntryId head_;  // head of the policy's only list
};

inline PolicyKind most_recent_kind() {
  return {.name = "most_recent", .make = [](const PolicyRoom& room) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<MostRecent>(room);
          }};
}

}  // namespace flexkv
