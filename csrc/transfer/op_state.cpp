#include "transfer/op_state.h"

#include <algorithm>
#include <numeric>

#include "transfer/slot_arrivals.h"

namespace flexkv {
namespace {

int32_t layers_in(const AttachedView* view, const PageSizes& sizes) {
  return view != nullptr ? view->view().num_layers() : sizes.layers;
}

// Returns the first layer of each stage of an op.
std::vector<int32_t> stage_starts(const OpSpec& spec, const AttachedView* view, const PageSizes& sizes) {
  constexpr KindSet kSlotCopies = kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H);
  if (spec.layerwise) {
    if (!sizes.stages.empty()) return sizes.stages;
    std::vector<int32_t> each(static_cast<size_t>(layers_in(view, sizes)));
    std::iota(each.begin(), each.end(), 0);
    return each;
  }
  if (view != nullptr && (kind_bit(spec.kind) & kSlotCopies) != 0) return view->ranges();
  return {0};
}

}  // namespace

OpState::OpState(OpSpec spec, int64_t ticket, uint64_t sequence, std::shared_ptr<const AttachedView> view,
                 PageSizes sizes)
    : PageProgress(static_cast<int32_t>(spec.pages()), layers_in(view.get(), sizes),
                   stage_starts(spec, view.get(), sizes), spec.layerwise),
      effective_priority(spec.priority),
      stage_events(static_cast<size_t>(stages())),
      spec_(std::move(spec)),
      ticket_(ticket),
      sequence_(sequence),
      view_(std::move(view)),
      page_bytes_(view_ ? view_->view().stripe_bytes() : sizes.bytes) {
  for (size_t page = 0; page < spec_.reads.size(); ++page) {
    if (spec_.reads[page] != kNoRead) expect(static_cast<int32_t>(page));
  }
}

void OpState::gate() {
  close_stages();
  stage_fences_.resize(static_cast<size_t>(stages()));
}

void OpState::open(int32_t layers, const std::shared_ptr<StreamEvent>& fence) {
  const auto [first, end] = open_to(layers);
  for (int32_t stage = first; stage < end; ++stage) stage_fences_[static_cast<size_t>(stage)] = fence;
}

const std::shared_ptr<StreamEvent>& OpState::fence_of(int32_t stage) const {
  return stage_fences_.empty() ? fence : stage_fences_[static_cast<size_t>(stage)];
}

// Returns how many bytes of a page are moved in the stages from `first_stage` to `last_stage`.
int64_t OpState::bytes_of(int32_t first_stage, int32_t last_stage) const {
  if (stages() == 1) return page_bytes_;
  const int32_t lo = layers_of(first_stage).first;
  const int32_t hi = layers_of(last_stage).second;
  return view_ ? view_->layer_bytes(lo, hi) : page_bytes_ / layers() * (hi - lo);
}

OpState::Taken OpState::take(int64_t max_bytes, bool all_stages) {
  const int32_t stage = next_stage();
  const int64_t page_bytes = bytes_of(stage, all_stages ? stages() - 1 : stage);
  // In a layerwise op, all pages must move together. Otherwise the last page's first layer would be moved
  // only after the first page's last layer.
  if (all_stages && spec_.layerwise) max_bytes = INT64_MAX;
  const int64_t most = std::max<int64_t>(1, max_bytes / std::max<int64_t>(1, page_bytes));
  std::vector<int32_t> taken = take_at(stage, static_cast<size_t>(most));
  const int32_t last = all_stages ? last_free(taken, stage) : stage;
  return {stage, last, std::move(taken)};
}

void OpState::fail(int32_t page, PageState end, const std::string& reason, FailureCause cause) {
  end_page(page, end);
  if (cause != FailureCause::kUnknown) {
    causes_.resize(static_cast<size_t>(pages()));
    causes_[static_cast<size_t>(page)] = cause;
  }
  if (reason_.empty()) reason_ = reason;
}

void OpState::fail_empty(PageState end, const std::string& reason) {
  empty_end_ = end;
  reason_ = reason;
}

FailureCause OpState::cause(int32_t page) const {
  switch (state(page)) {
    case PageState::kFailed:
      return causes_.empty() ? FailureCause::kUnknown : causes_[static_cast<size_t>(page)];
    case PageState::kLaneDown:
      return FailureCause::kTransport;
    default:
      return FailureCause::kNotExecuted;
  }
}

void OpState::keep_digests(int32_t page, const std::vector<uint64_t>& digests) {
  if (digests.empty()) return;
  if (digests_.empty()) digests_.resize(static_cast<size_t>(pages()) * digests.size());
  std::copy(digests.begin(), digests.end(),
            digests_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(page) * digests.size()));
}

OpResult OpState::result() const {
  OpResult result{spec_.op_id,
                  ticket_,
                  Status::kOk,
                  failed_pages(),
                  reason_,
                  digests_,
                  digests_.empty() ? 0 : digests_.size() / static_cast<size_t>(pages())};
  const PageState end = pages() == 0 ? empty_end_ : state(0);
  if (pages() == 0 ? end == PageState::kOk : result.failed.empty()) return result;
  result.status = Status::kFailed;
  bool uniform = static_cast<int32_t>(result.failed.size()) == pages();
  for (const int32_t page : result.failed) {
    result.causes.push_back(cause(page));
    uniform &= state(page) == end;
  }
  if (issued() || !uniform) return result;
  if (end == PageState::kCancelled) result.status = Status::kCancelled;
  if (end == PageState::kSkipped) result.status = Status::kSkipped;
  if (end == PageState::kLaneDown) result.status = Status::kLaneDown;
  return result;
}

}  // namespace flexkv
