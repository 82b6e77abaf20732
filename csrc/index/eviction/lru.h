// Evicts the least recently used block first and, within a chain used together, the block farthest from the
// start, because a block is of no use without the ones before it.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind lru_kind();

}  // namespace flexkv
