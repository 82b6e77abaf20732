// Copies between an engine pool that is plain memory and the host pool.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

// If the view has digests, D2H computes one for each run from the engine's own bytes, and H2D checks them
// before the first byte reaches the engine: a page that changed in between fails with "digest mismatch".
class HostMover : public PageMover {
 public:
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
};

}  // namespace flexkv
