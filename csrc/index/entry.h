// What the index knows about one block.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

using EntryId = uint32_t;
inline constexpr EntryId kNoEntry = UINT32_MAX;

enum class EntryState : uint32_t {
  kFree = 0,     // on the free list, or a list head
  kPending = 1,  // has a slot that is being written; no hit, and must not be stored a second time
  kReady = 2,    // may be hit
  kRemoved = 3,  // no longer in the map, but still leased, so its slot is not free yet
};

// 32 bytes: two entries per cache line, and a chain stored together is one sequential read.
struct alignas(32) Entry {
  BlockKey key;
  uint32_t slot;
  EntryId newer;  // next in its list, further from eviction
  EntryId older;  // neighbour towards eviction; within a chain the next block, which speeds up walks
  uint32_t meta;  // state, group and pins in one word, so that walks test all of them in one comparison

  static constexpr uint32_t kPinBits = 24;
  static constexpr uint32_t kGroupBits = 6;
  static constexpr uint32_t kMaxPins = (1U << kPinBits) - 1;

  static constexpr uint32_t pack(EntryState state, uint32_t group, uint32_t pins) {
    return static_cast<uint32_t>(state) << (kPinBits + kGroupBits) | group << kPinBits | pins;
  }
  uint32_t pins() const { return meta & kMaxPins; }
  uint32_t group() const { return meta >> kPinBits & ((1U << kGroupBits) - 1); }
  EntryState state() const { return static_cast<EntryState>(meta >> (kPinBits + kGroupBits)); }
  void set_state(EntryState state) { meta = pack(state, group(), pins()); }

  // Whether the entry is in this state and of this group; pins do not matter.
  bool is_in(EntryState in_state, uint32_t in_group) const {
    return (meta & ~kMaxPins) == pack(in_state, in_group, 0);
  }
  // Whether the entry is a hit for this group.
  bool is_ready_in(uint32_t in_group) const { return is_in(EntryState::kReady, in_group); }
};
static_assert(sizeof(Entry) == 32);

inline constexpr uint32_t kMaxGroups = 1U << Entry::kGroupBits;

}  // namespace flexkv
