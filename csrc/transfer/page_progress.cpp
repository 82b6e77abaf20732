#include "transfer/page_progress.h"

#include <algorithm>
#include <utility>

namespace flexkv {

PageProgress::PageProgress(int32_t pages, int32_t layers, std::vector<int32_t> starts, bool layerwise)
    : layers_(layers),
      layerwise_(layerwise),
      starts_(std::move(starts)),
      states_(static_cast<size_t>(pages), PageState::kWaiting),
      stage_(starts_.size() > 1 ? states_.size() : 0),
      ready_(starts_.size()),
      left_(starts_.size(), pages),
      unissued_(left_),
      issued_stages_(states_.size()),
      open_stages_(stages()),
      open_pages_(pages) {}

std::pair<int32_t, int32_t> PageProgress::layers_of(int32_t stage) const {
  const auto at = static_cast<size_t>(stage);
  return {starts_[at], at + 1 < starts_.size() ? starts_[at + 1] : layers_};
}

int32_t PageProgress::stage_of(int32_t layer) const {
  const auto next = std::upper_bound(starts_.begin(), starts_.end(), layer);
  return static_cast<int32_t>(next - starts_.begin()) - 1;
}

void PageProgress::mark_issued(int32_t page, int32_t stage) {
  int32_t& count = issued_stages_[static_cast<size_t>(page)];
  for (; count <= stage; ++count) --unissued_[static_cast<size_t>(count)];
}

void PageProgress::close_stages() {
  open_stages_ = 0;
  at_gate_.resize(static_cast<size_t>(stages()));
}

std::pair<int32_t, int32_t> PageProgress::open_to(int32_t layers) {
  const int32_t first = open_stages_;
  while (open_stages_ < stages() && layers_of(open_stages_).second <= layers) {
    const auto stage = static_cast<size_t>(open_stages_++);
    for (const int32_t page : at_gate_[stage]) {
      if (state(page) == PageState::kWaiting) make_ready(page);
    }
    at_gate_[stage].clear();
  }
  return {first, open_stages_};
}

void PageProgress::expect(int32_t page) {
  if (arrived_.empty()) arrived_.assign(states_.size(), layers_);
  arrived_[static_cast<size_t>(page)] = 0;
}

bool PageProgress::arrive(int32_t page, int32_t layers) {
  const int32_t before = std::exchange(arrived_[static_cast<size_t>(page)], std::min(layers, layers_));
  return before < arrived_[static_cast<size_t>(page)];
}

bool PageProgress::has_arrived(int32_t page) const {
  if (arrived_.empty()) return true;
  return arrived_[static_cast<size_t>(page)] >= layers_of(stage_at(page)).second;
}

int32_t PageProgress::layers_done(int32_t page) const {
  if (state(page) == PageState::kOk) return layers_;
  return layers_of(stage_at(page)).first;
}

void PageProgress::make_ready(int32_t page) {
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

int32_t PageProgress::next_stage() {
  while (ready_[static_cast<size_t>(lowest_ready_)].empty()) ++lowest_ready_;
  if (layerwise_) return lowest_ready_;
  // Pages at the highest stage are preferred, so that they finish early and ops that wait for them can start.
  int32_t stage = stages() - 1;
  while (ready_[static_cast<size_t>(stage)].empty()) --stage;
  return stage;
}

std::vector<int32_t> PageProgress::take_at(int32_t stage, size_t most) {
  ReadyList& list = ready_[static_cast<size_t>(stage)];
  const size_t count = std::min(most, list.pages.size() - list.head);
  const auto begin = list.pages.begin() + static_cast<std::ptrdiff_t>(list.head);
  std::vector<int32_t> taken(begin, begin + static_cast<std::ptrdiff_t>(count));
  list.head += count;
  if (list.empty()) list = {};
  for (const int32_t page : taken) states_[static_cast<size_t>(page)] = PageState::kMoving;
  ready_pages_ -= static_cast<int32_t>(count);
  moving_pages_ += static_cast<int32_t>(count);
  issued_ = true;
  return taken;
}

int32_t PageProgress::last_free(const std::vector<int32_t>& pages, int32_t last) const {
  int32_t arrived = layers_;
  for (size_t i = 0; !arrived_.empty() && i < pages.size(); ++i) {
    const auto at = static_cast<size_t>(pages[i]);
    if (states_[at] == PageState::kMoving) arrived = std::min(arrived, arrived_[at]);
  }
  while (last + 1 < open_stages_ && layers_of(last + 1).second <= arrived) ++last;
  return last;
}

bool PageProgress::pass(int32_t page, int32_t stage) {
  const auto at = static_cast<size_t>(page);
  mark_issued(page, stage);
  bool done = false;
  for (int32_t passed = stage_at(page); passed <= stage; ++passed) {
    done |= --left_[static_cast<size_t>(passed)] == 0;
    if (!stage_.empty()) stage_[at] = passed + 1;
  }
  return done;
}

bool PageProgress::advance(int32_t page, int32_t stage) {
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

void PageProgress::end_page(int32_t page, PageState end) {
  const auto at = static_cast<size_t>(page);
  const int32_t stage = stage_at(page);
  if (states_[at] == PageState::kMoving) --moving_pages_;
  if (states_[at] == PageState::kReady) {
    std::vector<int32_t>& list = ready_[static_cast<size_t>(stage)].pages;
    // Pages of an op are cancelled from the last to the first, so the search starts at the end.
    const auto found = std::find(list.rbegin(), list.rend(), page);
    list.erase(std::next(found).base());
    --ready_pages_;
  }
  states_[at] = end;
  --open_pages_;
  mark_issued(page, stages() - 1);
  for (auto later = static_cast<size_t>(stage); later < left_.size(); ++later) --left_[later];
}

std::vector<int32_t> PageProgress::failed_pages() const {
  std::vector<int32_t> failed;
  for (int32_t page = 0; page < pages(); ++page) {
    if (state(page) > PageState::kOk) failed.push_back(page);
  }
  return failed;
}

}  // namespace flexkv
