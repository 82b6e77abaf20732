// Evicts the least recently used block first, but counts a block that was hit as used one capacity later than
// it was: blocks that were hit once are hit again more often than those that never were. Within a chain, it
// evicts the block farthest from the start first.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind bonus_lru_kind();

}  // namespace flexkv
