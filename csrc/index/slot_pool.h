// The free slots of one size class of a tier. A slot is up once its memory or file can be used; the pool
// grows while these are being prepared. Only `retire` takes slots out permanently, when their memory or file
// is lost.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace flexkv {

class SlotPool {
 public:
  // Throws CapacityError if there is no memory for `max_slots` slots.
  explicit SlotPool(uint32_t max_slots) : max_slots_(max_slots) {
    try {
      freed_.reserve(max_slots);
    } catch (const std::bad_alloc&) {
      throw CapacityError("the block index has no memory for a group of " + std::to_string(max_slots) +
                          " slots");
    }
  }

  uint32_t max_slots() const { return max_slots_; }
  uint32_t up() const { return up_; }
  // How many slots can hold blocks.
  uint32_t usable() const { return up_ - retired_up_; }
  size_t free() const { return freed_.size() + (up_ - unused_from_) - retired_unused_; }

  // Slots 0 .. slots-1 may be used from now on. Throws BlockRangeError outside [up(), max_slots()].
  void grow(uint32_t slots) {
    if (slots < up_ || slots > max_slots_) {
      throw BlockRangeError("grow to " + std::to_string(slots) + " slots; allowed are " +
                            std::to_string(up_) + " to " + std::to_string(max_slots_));
    }
    up_ = slots;
    if (!retired_.empty()) count_retired();
  }

  // Returns the slot freed last, else the lowest one never used, else none.
  std::optional<uint32_t> take() {
    if (!freed_.empty()) {
      const uint32_t slot = freed_.back();
      freed_.pop_back();
      return slot;
    }
    while (unused_from_ < up_) {
      const uint32_t slot = unused_from_++;
      if (!is_retired(slot)) return slot;
      --retired_unused_;
    }
    return std::nullopt;
  }

  void give_back(uint32_t slot) {
    if (!is_retired(slot)) freed_.push_back(slot);
  }

  // Takes the slots marked in `used`. Throws ContractError if one was taken before, or unless there is one
  // flag for each slot that is up.
  void adopt(const std::vector<uint8_t>& used) {
    if (unused_from_ != 0 || used.size() != up_) {
      throw ContractError(
          "adopt: only a pool of which no slot was taken can have slots in use from the start");
    }
    unused_from_ = up_;
    while (unused_from_ > 0 && !used[unused_from_ - 1]) --unused_from_;
    // Descending, so that the lowest is taken first.
    for (uint32_t slot = unused_from_; slot > 0; --slot) {
      if (!used[slot - 1]) give_back(slot - 1);
    }
    if (!retired_.empty()) count_retired();
  }

  // Permanently takes the slots marked in `gone` (one flag for each of max_slots) out of use; a slot in use
  // leaves when it is freed. Throws ContractError for another number of flags.
  void retire(std::span<const uint8_t> gone) {
    if (gone.size() != max_slots_) {
      throw ContractError("retire: " + std::to_string(gone.size()) +
                          " flags; needed is one for each of the " + std::to_string(max_slots_) + " slots");
    }
    retired_.resize(max_slots_);
    for (uint32_t slot = 0; slot < max_slots_; ++slot) retired_[slot] |= gone[slot] != 0;
    std::erase_if(freed_, [&](uint32_t slot) { return is_retired(slot); });
    count_retired();
  }

  bool is_retired(uint32_t slot) const { return !retired_.empty() && retired_[slot] != 0; }

  // For integrity checks: the freed slots, and the first slot that never left the pool.
  const std::vector<uint32_t>& freed() const { return freed_; }
  uint32_t unused_from() const { return unused_from_; }

 private:
  void count_retired() {
    retired_up_ = retired_unused_ = 0;
    for (uint32_t slot = 0; slot < up_; ++slot) {
      retired_up_ += retired_[slot];
      retired_unused_ += slot >= unused_from_ ? retired_[slot] : 0;
    }
  }

  uint32_t max_slots_;
  uint32_t up_ = 0;
  uint32_t unused_from_ = 0;
  uint32_t retired_up_ = 0;      // retired slots among those that are up
  uint32_t retired_unused_ = 0;  // how many of these were never used
  std::vector<uint32_t> freed_;
  std::vector<uint8_t> retired_;  // one flag per slot; empty while none is retired
};

}  // namespace flexkv
