#include "transfer/run_digests.h"

#include "base/digest.h"

namespace flexkv {
namespace {

// Calls `visit` with the number of each run of layers [lo, hi) and the run's segment, until `visit` returns
// false.
template <typename Visit>
void each_run(const AttachedView& view, int32_t lo, int32_t hi, Visit visit) {
  for (int32_t layer = lo; layer < hi; ++layer) {
    for (const size_t run : view.runs_of(layer)) {
      if (!visit(run, view.view().runs()[run])) return;
    }
  }
}

uint64_t digest_in(const std::byte* stripe, const Segment& run) {
  return run_digest(stripe + run.page_offset, static_cast<size_t>(run.run_bytes));
}

}  // namespace

void write_digests_of_block(const AttachedView& view, int64_t block, int32_t slot, int32_t lo, int32_t hi) {
  uint64_t* digests = view.digests(slot);
  each_run(view, lo, hi, [&](size_t number, const Segment& run) {
    digests[number] = run_digest(reinterpret_cast<const void*>(run_address(run, block)),
                                 static_cast<size_t>(run.run_bytes));
    return true;
  });
}

void write_digests_of_stripe(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi) {
  uint64_t* digests = view.digests(slot);
  each_run(view, lo, hi, [&](size_t number, const Segment& run) {
    digests[number] = digest_in(view.stripe(slot), run);
    return true;
  });
}

MoveResult digest_mismatch(const AttachedView& view, size_t run, int32_t slot) {
  return {Status::kFailed,
          "digest mismatch in run " + std::to_string(run) + " (layer " +
              std::to_string(view.view().runs()[run].layer) + ") of slot " + std::to_string(slot),
          {},
          FailureCause::kContent};
}

MoveResult check_digests(const AttachedView& view, int32_t slot, int32_t lo, int32_t hi) {
  const uint64_t* digests = view.digests(slot);
  MoveResult result;
  each_run(view, lo, hi, [&](size_t number, const Segment& run) {
    if (digest_in(view.stripe(slot), run) == digests[number]) return true;
    result = digest_mismatch(view, number, slot);
    return false;
  });
  return result;
}

}  // namespace flexkv
