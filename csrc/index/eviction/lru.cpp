#include "index/eviction/lru.h"

namespace flexkv {
namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(const PolicyRoom& room) : table_(room.table), head_(room.first_head) {}

  void admit(EntryId first, EntryId last, const Use&) override { table_.link_after(head_, first, last); }

  EntryId take_victim() override {
    const EntryId oldest = table_[head_].newer;
    if (oldest == head_) return kNoEntry;
    table_.unlink(oldest, oldest);
    return oldest;
  }

 private:
  EntryTable& table_;
  EntryId head_;
};

}  // namespace

PolicyKind lru_kind() {
  return {.name = "lru", .make = [](const PolicyRoom& room) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<LruPolicy>(room);
          }};
}

}  // namespace flexkv
