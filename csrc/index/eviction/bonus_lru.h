// An eviction policy that evicts the least recently used block first, with a bonus for blocks that were hit.
// The policy counts time in uses of blocks. If a block was hit, the policy adds a bonus to the time of the
// block's last use. The bonus is the number of usable slots of the size class. The bonus is useful because
// blocks that were hit are hit again more often than blocks that were never hit. Within a chain, the block
// farthest from the start is evicted first.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind bonus_lru_kind();

}  // namespace flexkv
