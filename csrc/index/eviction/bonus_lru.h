// An eviction policy that evicts the least recently used block first, with a bonus for blocks that were hit.
// The policy treats a block that was hit as if its last use had come later, by as many uses as the size class
// has slots. The reason is that such blocks are hit again more often than blocks that were never hit. Within
// a chain, the block farthest from the start is evicted first.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind bonus_lru_kind();

}  // namespace flexkv
