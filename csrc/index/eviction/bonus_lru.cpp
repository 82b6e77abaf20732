#include "index/eviction/bonus_lru.h"

#include <array>
#include <string>

#include "base/error.h"

namespace flexkv {
namespace {

// Keeps two lists in the order of use: one of blocks that were hit, the other of blocks that were never hit.
// The bonus is the same for every block that was hit. So the next block to evict is the oldest block of one
// of the two lists, and one comparison decides which.
//
// Time is counted in uses: each block stored or hit advances the time by one. Changing the order of blocks
// does not advance the time.
class BonusLruPolicy final : public EvictionPolicy {
 public:
  explicit BonusLruPolicy(const PolicyRoom& room)
      : table_(room.table),
        notes_(*room.notes),
        pool_(room.pool),
        heads_{room.first_head, room.first_head + 1} {}

  void admit(EntryId first, EntryId last, const Use& use) override {
    // The loop goes from the last block to the first. Consecutive blocks that go to the same list are linked
    // together, so that they stay a chain.
    EntryId run_last = last;
    for (EntryId at = last;;) {
      const bool hit = admit_one(at, use);
      const EntryId newer = table_[at].newer;
      if (at == first || goes_to_hit(newer, use) != hit) {
        table_.link_after(heads_[hit], at, run_last);
        run_last = newer;
      }
      if (at == first) return;
      at = newer;
    }
  }

  EntryId take_victim() override {
    const EntryId once = table_[heads_[kOnce]].newer;
    const EntryId hit = table_[heads_[kHit]].newer;
    EntryId oldest = once;
    if (once == heads_[kOnce]) {
      if (hit == heads_[kHit]) return kNoEntry;
      oldest = hit;
    } else if (hit != heads_[kHit] && time_of(hit) + pool_.usable() < time_of(once)) {
      oldest = hit;
    }
    table_.unlink(oldest, oldest);
    return oldest;
  }

  void check_integrity() const override {
    for (const size_t list : {kOnce, kHit}) {
      uint64_t newer_time = time_;
      for (EntryId at = table_[heads_[list]].older; at != heads_[list]; at = table_[at].older) {
        if (notes_[at] == 0 || (notes_[at] & kHit) != list) {
          throw ContractError("bonus_lru: entry " + std::to_string(at) + " is in the wrong list");
        }
        if (time_of(at) > newer_time) {
          throw ContractError("bonus_lru: entry " + std::to_string(at) + " was used after the one before it");
        }
        newer_time = time_of(at);
      }
    }
  }

 private:
  // The numbers of the two lists. The lowest bit of a note is the number of the block's list; the other bits
  // are the time of the block's last use.
  static constexpr size_t kOnce = 0, kHit = 1;

  uint64_t time_of(EntryId entry) const { return notes_[entry] >> 1; }
  bool goes_to_hit(EntryId entry, const Use& use) const { return use.hit || (notes_[entry] & kHit) != 0; }

  // Writes the block's note for this use. Returns whether the block goes to the list of blocks that were hit.
  bool admit_one(EntryId entry, const Use& use) {
    PolicyNote& note = notes_[entry];
    const bool hit = goes_to_hit(entry, use);
    time_ += use.hit || note == 0;
    note = time_ << 1 | static_cast<PolicyNote>(hit);
    return hit;
  }

  EntryTable& table_;
  HugeArray<PolicyNote>& notes_;
  const SlotPool& pool_;
  std::array<EntryId, 2> heads_;
  uint64_t time_ = 1;
};

}  // namespace

PolicyKind bonus_lru_kind() {
  return {.name = "bonus_lru",
          .lists = 2,
          .notes = true,
          .make = [](const PolicyRoom& room) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<BonusLruPolicy>(room);
          }};
}

}  // namespace flexkv
