// Least recently used first, but a block that was hit counts as used one capacity later than it was: what
// came back once comes back more often than what never did. Of a chain, the block farthest from the start
// first.
#pragma once
#include "index/eviction/eviction_policy.h"

namespace flexkv {

PolicyKind bonus_lru_kind();

}  // namespace flexkv
