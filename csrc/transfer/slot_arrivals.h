// Which read from disk filled a slot last, and how much of the page is verified. A load in another process,
// or on another transfer engine of this one, waits by it for pages that are still being read.
#pragma once
#include <atomic>
#include <cstdint>

namespace flexkv {

// The number of a read that nobody waits for.
inline constexpr int64_t kNoRead = 0;
// The bits of a word below the number of the read.
inline constexpr int kArrivalBits = 16;
inline constexpr int64_t kMostReads = int64_t{1} << (64 - kArrivalBits - 1);
// The layers of a page that is verified as a whole.
inline constexpr int32_t kAllLayers = (1 << kArrivalBits) - 1;

// What a read has brought to a slot so far.
struct SlotArrival {
  bool failed = false;  // it was not read, or the slot has been filled by a later read
  int32_t layers = 0;   // [0, layers) are verified: whoever sees this sees their bytes
};

// One word per slot, in memory that every process of the unit maps; all zero at first. Reads are numbered
// upwards over the pool's life, and a slot is given to one read at a time.
class SlotArrivals {
 public:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "shared between processes");

  static constexpr int64_t bytes_for(int64_t slots) { return slots * static_cast<int64_t>(sizeof(Word)); }

  explicit SlotArrivals(Word* words) : words_(words) {}

  // Records that the page that `read` was to bring to `slot` has ended. Call after its last byte, and before
  // anybody else may be given the slot.
  void settle(int64_t slot, int64_t read, bool verified) const {
    put(slot, read, verified ? kAllLayers : kFailed);
  }
  // Records that layers [0, layers) of the page are verified and will not be touched any more; more are to
  // come. `layers` is in [1, kAllLayers).
  void advance(int64_t slot, int64_t read, int32_t layers) const { put(slot, read, layers); }

  SlotArrival look(int64_t slot, int64_t read) const {
    const uint64_t word = words_[slot].load(std::memory_order_acquire);
    const auto last = static_cast<int64_t>(word >> kArrivalBits);
    if (last < read) return {};
    const auto layers = static_cast<int32_t>(word & static_cast<uint64_t>(kAllLayers));
    if (last > read || layers == kFailed) return {.failed = true};
    return {.layers = layers};
  }

 private:
  static constexpr int32_t kFailed = 0;

  void put(int64_t slot, int64_t read, int32_t layers) const {
    const uint64_t word = static_cast<uint64_t>(read) << kArrivalBits | static_cast<uint64_t>(layers);
    words_[slot].store(word, std::memory_order_release);
  }

  Word* words_;
};

}  // namespace flexkv
