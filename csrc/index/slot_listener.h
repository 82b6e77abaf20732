// The interface through which a BlockIndex reports each change of what its slots hold.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

class SlotListener {
 public:
  virtual ~SlotListener() = default;
  // A block that is not visible yet got the slot. The slot may be written from now on.
  virtual void begin(uint32_t slot) = 0;
  // The slot's block became visible. Its bytes do not change until `withdraw`.
  virtual void publish(uint32_t slot, uint32_t group, const BlockKey& key) = 0;
  // The slot's block is no longer in the index; it may never have been visible.
  virtual void withdraw(uint32_t slot) = 0;
  // No block is visible any more: the index removed all of them.
  virtual void clear() = 0;
};

}  // namespace flexkv
