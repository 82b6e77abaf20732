// The interface through which a BlockIndex reports which block each of its slots holds, whenever this
// changes.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

class SlotListener {
 public:
  virtual ~SlotListener() = default;
  // The index gave the slot to a block that lookups cannot find yet. From this call on, an op may write the
  // slot.
  virtual void begin(uint32_t slot) = 0;
  // Lookups can find the slot's block from now on. The block's bytes do not change until `withdraw`.
  virtual void publish(uint32_t slot, uint32_t group, const BlockKey& key) = 0;
  // The slot's block is no longer in the index. `publish` may not have been called for it.
  virtual void withdraw(uint32_t slot) = 0;
  // The index removed all blocks.
  virtual void clear() = 0;
};

}  // namespace flexkv
