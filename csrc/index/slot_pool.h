// The free slots of one size class in one tier. A slot is *up* when its memory or file can be used. The pool
// grows as more memory or files become ready. `retire` permanently takes slots out of use after their memory
// or file was lost.
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
  // Throws CapacityError if there is no memory for the records of `max_slots` slots.
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
  // Returns the number of slots that can hold blocks: those that are up and not retired.
  uint32_t usable() const { return up_ - retired_up_; }
  size_t free() const { return freed_.size() + (up_ - unused_from_) - retired_unused_; }

  // Marks slots 0 to slots - 1 as up. Throws BlockRangeError if `slots` is outside [up(), max_slots()].
  void grow(uint32_t slots) {
    if (slots < up_ || slots > max_slots_) {
      throw BlockRangeError("grow to " + std::to_string(slots) + " slots; allowed are " +
                            std::to_string(up_) + " to " + std::to_string(max_slots_));
    }
    up_ = slots;
    if (!retired_.empty()) count_retired();
  }

  // Takes a free slot out of the pool and returns it: the slot that was freed last or, if no freed slot is
  // left, the lowest slot that was never used. Returns nullopt if no slot is free.
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

  // Frees a slot. A retired slot does not return to the pool.
  void give_back(uint32_t slot) {
    if (!is_retired(slot)) freed_.push_back(slot);
  }

  // Takes the slots that are marked in `used` out of the pool of free slots. Throws ContractError if a slot
  // was taken before this call, or if `used` does not have exactly one flag for each slot that is up.
  void adopt(const std::vector<uint8_t>& used) {
    if (unused_from_ != 0 || used.size() != up_) {
      throw ContractError(
          "adopt: only a pool of which no slot was taken can have slots in use from the start");
    }
    unused_from_ = up_;
    while (unused_from_ > 0 && !used[unused_from_ - 1]) --unused_from_;
    // The slots are freed in descending order, so that `take` returns the lowest slot first.
    for (uint32_t slot = unused_from_; slot > 0; --slot) {
      if (!used[slot - 1]) give_back(slot - 1);
    }
    if (!retired_.empty()) count_retired();
  }

  // Permanently takes the slots that are marked in `gone` out of use. If a slot holds a block, the slot stays
  // in use until that block is freed. Throws ContractError if `gone` does not have exactly max_slots() flags.
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

  // The next two functions are for integrity checks. `freed` returns the free slots that were in use at some
  // time. `unused_from` returns the first slot such that it and all higher slots were never taken.
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
  uint32_t retired_up_ = 0;      // number of retired slots that are up
  uint32_t retired_unused_ = 0;  // number of retired slots that are up and were never used
  std::vector<uint32_t> freed_;
  std::vector<uint8_t> retired_;  // one flag per slot; empty while no slot is retired
};

}  // namespace flexkv
