#include "transfer/host_mover.h"

#include "base/digest.h"
#include "transfer/host_copy.h"

namespace flexkv {
namespace {

// The runs of layers [lo, hi) of the engine's block, into the slot's trailer.
void write_digests(const AttachedView& attached, const PageMove& page, int32_t lo, int32_t hi) {
  uint64_t* digests = attached.digests(page.slot);
  for (int32_t layer = lo; layer < hi; ++layer) {
    for (const size_t run : attached.runs_of(layer)) {
      const Segment& segment = attached.view().runs()[run];
      digests[run] = run_digest(reinterpret_cast<const void*>(run_address(segment, page.block)),
                                static_cast<size_t>(segment.run_bytes));
    }
  }
}

// The number of the first run of layers [lo, hi) whose bytes in the slot do not match its trailer, or -1.
int64_t find_mismatch(const AttachedView& attached, const PageMove& page, int32_t lo, int32_t hi) {
  const uint64_t* digests = attached.digests(page.slot);
  const std::byte* stripe = attached.stripe(page.slot);
  for (int32_t layer = lo; layer < hi; ++layer) {
    for (const size_t run : attached.runs_of(layer)) {
      const Segment& segment = attached.view().runs()[run];
      const uint64_t found = run_digest(stripe + segment.page_offset, static_cast<size_t>(segment.run_bytes));
      if (found != digests[run]) return static_cast<int64_t>(run);
    }
  }
  return -1;
}

}  // namespace

MoveResult HostMover::move(const PageMove& page, int32_t layer_lo, int32_t layer_hi) {
  const AttachedView& attached = *page.view;
  std::byte* stripe = attached.stripe(page.slot);
  const auto segments = attached.segments(layer_lo, layer_hi);
  switch (page.kind) {
    case OpKind::kH2D:
      if (attached.has_digests()) {
        const int64_t run = find_mismatch(attached, page, layer_lo, layer_hi);
        if (run >= 0) {
          return {Status::kFailed,
                  "digest mismatch in run " + std::to_string(run) + " (layer " +
                      std::to_string(attached.view().runs()[static_cast<size_t>(run)].layer) + ") of slot " +
                      std::to_string(page.slot)};
        }
      }
      scatter_layers(attached.view(), segments, page.block, stripe);
      return {};
    case OpKind::kD2H:
      gather_layers(attached.view(), segments, page.block, stripe);
      if (attached.has_digests()) write_digests(attached, page, layer_lo, layer_hi);
      return {};
    default:
      return {Status::kFailed, std::string("the host mover cannot do ") + to_string(page.kind)};
  }
}

}  // namespace flexkv
