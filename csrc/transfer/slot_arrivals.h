// Which read from disk last filled a slot, and how much of the page is verified. A load in another process,
// or on another transfer engine of this process, uses it to wait for pages that are still being read.
#pragma once
#include <atomic>
#include <cstdint>

namespace flexkv {

// The number of a read that no load waits for.
inline constexpr int64_t kNoRead = 0;
// How many bits of a word lie below the read's number.
inline constexpr int kArrivalBits = 16;
inline constexpr int64_t kMostReads = int64_t{1} << (64 - kArrivalBits - 1);
// The value of `layers` for a page that is verified as a whole.
inline constexpr int32_t kAllLayers = (1 << kArrivalBits) - 1;

// What a read has brought into a slot so far.
struct SlotArrival {
  bool failed = false;  // the page could not be read, or a later read has filled the slot
  int32_t layers = 0;   // [0, layers) are verified; a thread that sees this number also sees their bytes
};

// One word per slot, in memory that every process of the unit maps; all zero at first. Read numbers increase
// over the pool's life, and at most one read at a time fills a slot.
class SlotArrivals {
 public:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "shared between processes");

  static constexpr int64_t bytes_for(int64_t slots) { return slots * static_cast<int64_t>(sizeof(Word)); }

  explicit SlotArrivals(Word* words) : words_(words) {}

  // Records that `read` has ended its page for `slot`. Call after the page's last byte, and before another
  // page may get the slot.
  void settle(int64_t slot, int64_t read, bool verified) const {
    put(slot, read, verified ? kAllLayers : kFailed);
  }
  // Records that layers [0, layers) of the page are verified and will not be written any more, and that
  // further layers follow. `layers` is in [1, kAllLayers).
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
