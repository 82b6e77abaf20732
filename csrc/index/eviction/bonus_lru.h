// An eviction policy: the least recently used block first, with a bonus for blocks that were hit. A block
// that was hit is treated as if its last use were later by as many uses as the size class has slots, because
// such blocks are hit again more often than blocks that never were. Within a chain, the block farthest from
// the start is evicted first.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind bonus_lru_kind();

}  // namespace flexkv
