// Learns from a BlockIndex what its slots hold, whenever that changes.
#pragma once
#include <cstdint>

#include "index/block_key.h"

namespace flexkv {

class SlotListener {
 public:
  virtual ~SlotListener() = default;
  // A block that is not visible yet was given the slot, which may be written from now on.
  virtual void begin(uint32_t slot) = 0;
  // The slot's block became visible, and its bytes stay as they are.
  virtual void publish(uint32_t slot, uint32_t group, const BlockKey& key) = 0;
  // The slot's block is not visible any more.
  virtual void withdraw(uint32_t slot) = 0;
  // No block is visible any more.
  virtual void clear() = 0;
};

}  // namespace flexkv
