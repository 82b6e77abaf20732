// Copies between an engine pool that is plain memory and the host pool.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

class HostMover : public PageMover {
 public:
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
};

}  // namespace flexkv
