// The interface through which a BlockIndex reports which block each slot holds. The index reports every
// change.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

class SlotListener {
 public:
  virtual ~SlotListener() = default;
  // The index has given the slot to a block that lookups cannot find yet. From this call on, an op may write
  // the slot.
  virtual void begin(uint32_t slot) = 0;
  // Lookups can find the slot's block from now on. The block's bytes do not change until `withdraw`.
  virtual void publish(uint32_t slot, uint32_t group, const BlockKey& key) = 0;
  // The slot's block is no longer in the index. If the block never became ready, `publish` was not called for
  // it.
  virtual void withdraw(uint32_t slot) = 0;
  // The index removed all blocks.
  virtual void clear() = 0;
};

}  // namespace flexkv
