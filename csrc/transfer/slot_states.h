// Which read from disk filled a slot last, and whether the page verified: how a load, in another process or
// on another engine of this one, waits for pages that are still on their way up.
#pragma once
#include <atomic>
#include <cstdint>

namespace flexkv {

// A read that nobody waits for.
inline constexpr int64_t kNoRead = 0;
// Numbers of reads are shifted by one bit in a word.
inline constexpr int64_t kMostReads = int64_t{1} << 62;

enum class SlotArrival : uint8_t {
  kComing,  // the read has not ended the slot's page
  kThere,   // verified: whoever sees this sees its bytes
  kFailed,  // it did not come up, or the slot has been filled by a later read
};

// One word a slot, in memory that every process of the unit maps; all zero at first. Reads are numbered
// upwards over the pool's life, and a slot is given to one read at a time.
class SlotStates {
 public:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "shared between processes");

  static constexpr int64_t bytes_for(int64_t slots) { return slots * static_cast<int64_t>(sizeof(Word)); }

  explicit SlotStates(Word* words) : words_(words) {}

  // The page that `read` was to bring to `slot` has ended. After its last byte, and before anybody else may
  // be given the slot.
  void settle(int64_t slot, int64_t read, bool verified) const {
    words_[slot].store(static_cast<uint64_t>(read) << 1 | (verified ? 1 : 0), std::memory_order_release);
  }
  SlotArrival look(int64_t slot, int64_t read) const {
    const uint64_t word = words_[slot].load(std::memory_order_acquire);
    const auto last = static_cast<int64_t>(word >> 1);
    if (last < read) return SlotArrival::kComing;
    return last == read && (word & 1) != 0 ? SlotArrival::kThere : SlotArrival::kFailed;
  }

 private:
  Word* words_;
};

}  // namespace flexkv
