#include "transfer/host_mover.h"

#include "transfer/host_copy.h"

namespace flexkv {

MoveResult HostMover::move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  const AttachedView& attached = *page.view;
  std::byte* stripe = attached.stripe(page.slot);
  const auto segments = attached.segments(layer_lo, layer_hi);
  switch (page.kind) {
    case OpKind::kH2D:
      scatter_layers(attached.view(), segments, page.block, stripe);
      return {};
    case OpKind::kD2H:
      gather_layers(attached.view(), segments, page.block, stripe);
      return {};
    default:
      return {Status::kFailed, std::string("the host mover cannot do ") + to_string(page.kind)};
  }
}

}  // namespace flexkv
