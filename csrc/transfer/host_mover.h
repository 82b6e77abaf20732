// The mover that copies pages between an inference engine's pool in ordinary host memory and the host pool.
#pragma once
#include "transfer/page_mover.h"

namespace flexkv {

// Copies pages with the calling thread. If the view has digests, a D2H copy computes the digest of each run
// from the inference engine's bytes. An H2D copy checks the digests before it writes any byte to the
// inference engine's pool: a page that changed in host memory fails with "digest mismatch".
class HostMover : public PageMover {
 public:
  MoveResult move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) override;
};

}  // namespace flexkv
