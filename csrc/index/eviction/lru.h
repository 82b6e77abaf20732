// An eviction policy that evicts the least recently used block first. If the blocks of a chain were used
// together, the block farthest from the start is evicted first, because a block is useless without the blocks
// before it.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind lru_kind();

}  // namespace flexkv
