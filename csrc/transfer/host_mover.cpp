#include "transfer/host_mover.h"

#include "transfer/host_copy.h"
#include "transfer/run_digests.h"

namespace flexkv {

MoveResult HostMover::move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  const AttachedView& attached = *page.view;
  std::byte* stripe = attached.stripe(page.slot);
  const auto segments = attached.segments(layer_lo, layer_hi);
  switch (page.kind) {
    case OpKind::kH2D:
      if (attached.has_digests()) {
        MoveResult checked = check_digests(attached, page.slot, layer_lo, layer_hi);
        if (checked.status != Status::kOk) return checked;
      }
      scatter_layers(attached.view(), segments, page.block, stripe);
      return {};
    case OpKind::kD2H:
      gather_layers(attached.view(), segments, page.block, stripe);
      if (attached.has_digests()) {
        write_digests_of_block(attached, page.block, page.slot, layer_lo, layer_hi);
      }
      return {};
    default:
      return {Status::kFailed, std::string("the host mover cannot do ") + to_string(page.kind)};
  }
}

}  // namespace flexkv
