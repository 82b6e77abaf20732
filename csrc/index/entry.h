// The entry that a block index keeps for one block.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

using EntryId = uint32_t;
inline constexpr EntryId kNoEntry = UINT32_MAX;

enum class EntryState : uint32_t {
  kFree = 0,     // the entry is on the free list, was never used, or is a list head
  kPending = 1,  // the block's slot is being written: lookups miss the block, and no further op stores it
  kReady = 2,    // lookups may hit the block
  kRemoved = 3,  // the entry is not in the map any more, but is leased, so its slot is not free yet
};

// An entry is 32 bytes, so two entries fit in a cache line. The blocks of a request that are stored or used
// together form a chain: `older` links each block's entry to the entry of the next block. Usually the entries
// of a chain also have consecutive numbers, so that a lookup reads them sequentially.
struct alignas(32) Entry {
  BlockKey key;
  uint32_t slot;
  EntryId newer;  // the neighbour in the entry's list that is evicted after this entry
  EntryId older;  // the neighbour that is evicted before this entry; in a chain, the next block
  uint32_t meta;  // state, group and pins in one word, so that state and group can be compared in one step

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

  // Whether the entry has this state and this group, with or without pins.
  bool is_in(EntryState in_state, uint32_t in_group) const {
    return (meta & ~kMaxPins) == pack(in_state, in_group, 0);
  }
  // Whether the entry holds a ready block of this group, which lookups may hit.
  bool is_ready_in(uint32_t in_group) const { return is_in(EntryState::kReady, in_group); }
};
static_assert(sizeof(Entry) == 32);

inline constexpr uint32_t kMaxGroups = 1U << Entry::kGroupBits;

}  // namespace flexkv
