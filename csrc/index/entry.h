// What the index knows of one block.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

using EntryId = uint32_t;
inline constexpr EntryId kNoEntry = UINT32_MAX;

enum class EntryState : uint32_t {
  kFree = 0,     // on the free list, or a list head
  kPending = 1,  // has a slot that is being written; no hit, but nobody else may store it
  kReady = 2,    // may be hit
  kRemoved = 3,  // not in the map any more; leased, so its slot is not free yet
};

// 32 bytes: two entries a cache line, and a chain stored together is one sequential read.
struct alignas(32) Entry {
  BlockKey key;
  uint32_t slot;
  EntryId newer;  // neighbour in its list, away from eviction
  EntryId older;  // neighbour towards eviction. Of a chain used together: the next block, hence the successor hint
  uint32_t pins : 24;
  uint32_t group : 6;
  EntryState state : 2;
};
static_assert(sizeof(Entry) == 32);

inline constexpr uint32_t kMaxPins = (1u << 24) - 1;
inline constexpr uint32_t kMaxGroups = 1u << 6;

}  // namespace flexkv
