#include "transfer/op_state.h"

#include <algorithm>
#include <numeric>

#include "transfer/slot_arrivals.h"

namespace flexkv {

OpState::OpState(OpSpec spec, int64_t ticket, uint64_t sequence, std::shared_ptr<const AttachedView> view,
                 PageSizes sizes)
    : effective_priority(spec.priority),
      spec_(std::move(spec)),
      ticket_(ticket),
      sequence_(sequence),
      view_(std::move(view)),
      page_bytes_(view_ ? view_->view().stripe_bytes() : sizes.bytes),
      layers_(view_ ? view_->view().num_layers() : sizes.layers),
      states_(spec_.pages(), PageState::kWaiting) {
  starts_ = {0};
  if (spec_.layerwise && !view_ && !sizes.stages.empty()) {
    starts_ = std::move(sizes.stages);
  } else if (spec_.layerwise) {
    starts_.resize(static_cast<size_t>(layers_));
    std::iota(starts_.begin(), starts_.end(), 0);
  } else if (view_ && (kind_bit(spec_.kind) & (kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H))) != 0) {
    starts_ = view_->ranges();
  }
  const size_t stages = starts_.size();
  if (stages > 1) stage_.assign(states_.size(), 0);
  ready_.resize(stages);
  if (!spec_.reads.empty()) {
    arrived_.assign(states_.size(), layers_);
    for (size_t page = 0; page < arrived_.size(); ++page) {
      if (spec_.reads[page] != kNoRead) arrived_[page] = 0;
    }
  }
  open_pages_ = pages();
  left_.assign(stages, pages());
  unissued_ = left_;
  issued_stages_.resize(states_.size());
  open_stages_ = static_cast<int32_t>(stages);
  stage_events.resize(stages);
}

std::pair<int32_t, int32_t> OpState::layers_of(int32_t stage) const {
  const auto at = static_cast<size_t>(stage);
  return {starts_[at], at + 1 < starts_.size() ? starts_[at + 1] : layers_};
}

int32_t OpState::stage_of(int32_t layer) const {
  const auto next = std::upper_bound(starts_.begin(), starts_.end(), layer);
  return static_cast<int32_t>(next - starts_.begin()) - 1;
}

bool OpState::stage_done(int32_t stage) const { return left_[static_cast<size_t>(stage)] == 0; }

void OpState::mark_issued(int32_t page, int32_t stage) {
  int32_t& count = issued_stages_[static_cast<size_t>(page)];
  for (; count <= stage; ++count) --unissued_[static_cast<size_t>(count)];
}

bool OpState::stage_issued(int32_t stage) const { return unissued_[static_cast<size_t>(stage)] == 0; }

void OpState::gate() {
  open_stages_ = 0;
  at_gate_.resize(static_cast<size_t>(stages()));
  stage_fences_.resize(static_cast<size_t>(stages()));
}

void OpState::open(int32_t layers, const std::shared_ptr<StreamEvent>& fence) {
  while (open_stages_ < stages() && layers_of(open_stages_).second <= layers) {
    const auto stage = static_cast<size_t>(open_stages_++);
    stage_fences_[stage] = fence;
    for (const int32_t page : at_gate_[stage]) {
      if (state(page) == PageState::kWaiting) make_ready(page);
    }
    at_gate_[stage].clear();
  }
}

const std::shared_ptr<StreamEvent>& OpState::fence_of(int32_t stage) const {
  return stage_fences_.empty() ? fence : stage_fences_[static_cast<size_t>(stage)];
}

bool OpState::arrive(int32_t page, int32_t layers) {
  const int32_t before = std::exchange(arrived_[static_cast<size_t>(page)], std::min(layers, layers_));
  return before < arrived_[static_cast<size_t>(page)];
}

bool OpState::has_arrived(int32_t page) const {
  if (arrived_.empty()) return true;
  return arrived_[static_cast<size_t>(page)] >= layers_of(stage_at(page)).second;
}

int32_t OpState::layers_done(int32_t page) const {
  if (state(page) == PageState::kOk) return layers_;
  return layers_of(stage_at(page)).first;
}

void OpState::make_ready(int32_t page) {
  const auto at = static_cast<size_t>(page);
  const int32_t stage = stage_at(page);
  if (stage >= open_stages_) {
    states_[at] = PageState::kWaiting;
    at_gate_[static_cast<size_t>(stage)].push_back(page);
    return;
  }
  states_[at] = PageState::kReady;
  ready_[static_cast<size_t>(stage)].pages.push_back(page);
  lowest_ready_ = ready_pages_ == 0 ? stage : std::min(lowest_ready_, stage);
  ++ready_pages_;
}

OpState::Taken OpState::take(int64_t max_bytes, bool all_stages) {
  while (ready_[static_cast<size_t>(lowest_ready_)].empty()) ++lowest_ready_;
  int32_t stage = lowest_ready_;
  if (!spec_.layerwise) {  // what waits for whole pages can then start while others still move
    for (stage = stages() - 1; ready_[static_cast<size_t>(stage)].empty();) --stage;
  }
  ReadyList& list = ready_[static_cast<size_t>(stage)];
  const int32_t lo = layers_of(stage).first;
  const int32_t hi = layers_of(all_stages ? stages() - 1 : stage).second;
  const int64_t page_bytes = stages() == 1 ? page_bytes_
                             : view_       ? view_->layer_bytes(lo, hi)
                                           : page_bytes_ / layers_ * (hi - lo);
  // In a layerwise op all pages go together: else the last page's first layer would come after the first
  // page's last.
  if (all_stages && spec_.layerwise) max_bytes = INT64_MAX;
  const auto most = static_cast<size_t>(std::max<int64_t>(1, max_bytes / std::max<int64_t>(1, page_bytes)));
  const size_t count = std::min(most, list.pages.size() - list.head);
  const auto begin = list.pages.begin() + static_cast<std::ptrdiff_t>(list.head);
  std::vector<int32_t> taken(begin, begin + static_cast<std::ptrdiff_t>(count));
  list.head += count;
  if (list.empty()) list = {};
  for (const int32_t page : taken) states_[static_cast<size_t>(page)] = PageState::kMoving;
  ready_pages_ -= static_cast<int32_t>(count);
  moving_pages_ += static_cast<int32_t>(count);
  issued_ = true;
  const int32_t last = all_stages ? last_free(taken, stage) : stage;
  return {stage, last, std::move(taken)};
}

int32_t OpState::last_free(const std::vector<int32_t>& pages, int32_t last) const {
  int32_t arrived = layers_;
  for (size_t i = 0; !arrived_.empty() && i < pages.size(); ++i) {
    const auto at = static_cast<size_t>(pages[i]);
    if (states_[at] == PageState::kMoving) arrived = std::min(arrived, arrived_[at]);
  }
  while (last + 1 < open_stages_ && layers_of(last + 1).second <= arrived) ++last;
  return last;
}

bool OpState::pass(int32_t page, int32_t stage) {
  const auto at = static_cast<size_t>(page);
  mark_issued(page, stage);
  bool done = false;
  for (int32_t passed = stage_at(page); passed <= stage; ++passed) {
    done |= --left_[static_cast<size_t>(passed)] == 0;
    if (!stage_.empty()) stage_[at] = passed + 1;
  }
  return done;
}

bool OpState::advance(int32_t page, int32_t stage) {
  const auto at = static_cast<size_t>(page);
  --moving_pages_;
  const bool done = pass(page, stage);
  if (stage + 1 < stages()) {
    if (has_arrived(page)) {
      make_ready(page);
    } else {
      states_[at] = PageState::kWaiting;
    }
  } else {
    states_[at] = PageState::kOk;
    --open_pages_;
  }
  return done;
}

void OpState::fail(int32_t page, PageState end, const std::string& reason, FailureCause cause) {
  const auto at = static_cast<size_t>(page);
  const int32_t stage = stage_at(page);
  if (states_[at] == PageState::kMoving) --moving_pages_;
  if (states_[at] == PageState::kReady) {
    std::vector<int32_t>& list = ready_[static_cast<size_t>(stage)].pages;
    // Ops are cancelled back to front, so search from the end.
    const auto found = std::find(list.rbegin(), list.rend(), page);
    list.erase(std::next(found).base());
    --ready_pages_;
  }
  states_[at] = end;
  if (cause != FailureCause::kUnknown) {
    causes_.resize(states_.size());
    causes_[at] = cause;
  }
  --open_pages_;
  mark_issued(page, stages() - 1);
  for (auto later = static_cast<size_t>(stage); later < left_.size(); ++later) --left_[later];
  if (reason_.empty()) reason_ = reason;
}

std::vector<int32_t> OpState::failed_pages() const {
  std::vector<int32_t> failed;
  for (int32_t page = 0; page < pages(); ++page) {
    if (state(page) > PageState::kOk) failed.push_back(page);
  }
  return failed;
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
  if (digests_.empty()) digests_.resize(states_.size() * digests.size());
  std::copy(digests.begin(), digests.end(),
            digests_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(page) * digests.size()));
}

void OpState::fail_empty(PageState end, const std::string& reason) {
  empty_end_ = end;
  reason_ = reason;
}

OpResult OpState::result() const {
  OpResult result{spec_.op_id,
                  ticket_,
                  Status::kOk,
                  failed_pages(),
                  reason_,
                  digests_,
                  digests_.empty() ? 0 : digests_.size() / states_.size()};
  const PageState end = pages() == 0 ? empty_end_ : states_.front();
  if (pages() == 0 ? end == PageState::kOk : result.failed.empty()) return result;
  result.status = Status::kFailed;
  for (const int32_t page : result.failed) result.causes.push_back(cause(page));
  const bool uniform =
      std::all_of(states_.begin(), states_.end(), [&](PageState state) { return state == end; });
  if (issued_ || !uniform) return result;
  if (end == PageState::kCancelled) result.status = Status::kCancelled;
  if (end == PageState::kSkipped) result.status = Status::kSkipped;
  if (end == PageState::kLaneDown) result.status = Status::kLaneDown;
  return result;
}

}  // namespace flexkv
