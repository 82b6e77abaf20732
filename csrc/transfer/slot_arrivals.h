// Records for each slot of a host pool which read from disk last filled it, and how many layers of the page
// are verified. A load in another process, or in another transfer engine of this process, uses these records
// to wait for pages that are still being read.
#pragma once
#include <atomic>
#include <cstdint>

namespace flexkv {

// The number in OpSpec::reads for a page that does not have to wait for a read.
inline constexpr int64_t kNoRead = 0;
// The number of low bits of a word that hold the number of layers. The bits above these hold the number that
// identifies the read, which is less than kMostReads.
inline constexpr int kArrivalBits = 16;
inline constexpr int64_t kMostReads = int64_t{1} << (64 - kArrivalBits - 1);
// The value of `layers` if the page is completely verified.
inline constexpr int32_t kAllLayers = (1 << kArrivalBits) - 1;

// How much of a page a read has put into its slot so far.
struct SlotArrival {
  bool failed = false;  // whether the page could not be read, or a later read has used the slot
  int32_t layers = 0;   // layers [0, layers) are verified; a thread that reads this also sees their bytes
};

// The records: one word per slot, 0 at first, in the memory of the pool, which every process of the unit
// maps. Each read has a number, and later reads have higher numbers. At most one read at a time fills a slot.
class SlotArrivals {
 public:
  using Word = std::atomic<uint64_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "shared between processes");

  static constexpr int64_t bytes_for(int64_t slots) { return slots * static_cast<int64_t>(sizeof(Word)); }

  explicit SlotArrivals(Word* words) : words_(words) {}

  // Records that `read` has finished its page in `slot`, with or without success. Must be called after the
  // last byte of the page has been moved, and before another page may get the slot.
  void settle(int64_t slot, int64_t read, bool verified) const {
    put(slot, read, verified ? kAllLayers : kFailed);
  }
  // Records that layers [0, layers) of the page are verified, and that `read` will not write them again. The
  // page's other layers are not in the slot yet. Precondition: `layers` is in [1, kAllLayers).
  void advance(int64_t slot, int64_t read, int32_t layers) const { put(slot, read, layers); }

  // Returns the progress of `read` in `slot`.
  SlotArrival look(int64_t slot, int64_t read) const {
    const uint64_t word = words_[slot].load(std::memory_order_acquire);
    const auto last = static_cast<int64_t>(word >> kArrivalBits);
    if (last < read) return {};
    const auto layers = static_cast<int32_t>(word & static_cast<uint64_t>(kAllLayers));
    if (last > read || layers == kFailed) return {.failed = true};
    return {.layers = layers};
  }

 private:
  static constexpr int32_t kFailed = 0;  // value in a word instead of the number of layers: the read failed

  void put(int64_t slot, int64_t read, int32_t layers) const {
    const uint64_t word = static_cast<uint64_t>(read) << kArrivalBits | static_cast<uint64_t>(layers);
    words_[slot].store(word, std::memory_order_release);
  }

  Word* words_;
};

}  // namespace flexkv
