// The slots of one group's tier that nobody owns. The pool grows while its memory comes up; it never shrinks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace flexkv {

class SlotPool {
 public:
  explicit SlotPool(uint32_t max_slots) : max_slots_(max_slots) { freed_.reserve(max_slots); }

  uint32_t max_slots() const { return max_slots_; }
  uint32_t up() const { return up_; }
  size_t free() const { return freed_.size() + (up_ - unused_from_); }

  // Slots 0 .. slots-1 may be used from now on. Throws BlockRangeError outside [up(), max_slots()].
  void grow(uint32_t slots) {
    if (slots < up_ || slots > max_slots_) {
      throw BlockRangeError("grow to " + std::to_string(slots) + " slots; allowed are " +
                            std::to_string(up_) + " to " + std::to_string(max_slots_));
    }
    up_ = slots;
  }

  // The slot freed last, else the lowest never used, else none.
  std::optional<uint32_t> take() {
    if (!freed_.empty()) {
      const uint32_t slot = freed_.back();
      freed_.pop_back();
      return slot;
    }
    if (unused_from_ < up_) return unused_from_++;
    return std::nullopt;
  }

  void give_back(uint32_t slot) { freed_.push_back(slot); }

  // For integrity checks: slots given back, and the first that never left the pool.
  const std::vector<uint32_t>& freed() const { return freed_; }
  uint32_t unused_from() const { return unused_from_; }

 private:
  uint32_t max_slots_;
  uint32_t up_ = 0;
  uint32_t unused_from_ = 0;
  std::vector<uint32_t> freed_;
};

}  // namespace flexkv
