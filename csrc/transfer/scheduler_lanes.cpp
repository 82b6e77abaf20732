// The part of the scheduler for lanes: the functions with which they take work items and report results.
#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "transfer/scheduler.h"

namespace flexkv {
namespace {

PageState bad_state(Status status) {
  switch (status) {
    case Status::kCancelled:
      return PageState::kCancelled;
    case Status::kSkipped:
      return PageState::kSkipped;
    case Status::kLaneDown:
      return PageState::kLaneDown;
    default:
      return PageState::kFailed;
  }
}

}  // namespace

void Scheduler::add_lane(std::shared_ptr<Lane> lane) {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < kOpKinds; ++i) {
    if ((lane->kinds() & kind_bit(static_cast<OpKind>(i))) == 0) continue;
    KindQueue& queue = queues_[static_cast<size_t>(i)];
    if (queue.lane >= 0) {
      throw ContractError(std::string("two lanes for ") + to_string(static_cast<OpKind>(i)) + ": " +
                          lanes_[static_cast<size_t>(queue.lane)]->lane->name() + " and " + lane->name());
    }
    queue.lane = static_cast<int32_t>(lanes_.size());
  }
  lanes_.push_back(std::make_unique<LaneEntry>());
  lanes_.back()->lane = std::move(lane);
}

KindSet Scheduler::kinds() const {
  const std::lock_guard lock(mutex_);
  KindSet all = 0;
  for (const auto& entry : lanes_) all |= entry->lane->kinds();
  return all;
}

// Returns the op from which a lane takes its next work item; null if there is none. Usually this is the
// oldest op of the most urgent priority. After kPiecesBeforeAged consecutive items have overtaken less urgent
// ops, returns the oldest of those ops once. Returns only ops whose kind is in `allowed`. If the most urgent
// runnable ops are all of other kinds, returns null so that less urgent ops do not overtake them. (This does
// not apply if the lane's kinds_are_apart().)
OpState* Scheduler::pick(LaneEntry& entry, KindSet allowed) {
  OpState* urgent = nullptr;
  OpState* patient = nullptr;  // the oldest of the less urgent ops
  bool urgent_found = false;
  bool patient_found = false;
  const bool apart = entry.lane->kinds_are_apart();
  int32_t& streak = entry.urgent_streaks[apart ? static_cast<size_t>(std::countr_zero(allowed)) : 0];
  for (int priority = 0; priority < kPriorities; ++priority) {
    OpState* oldest = nullptr;
    bool found = false;
    for (int kind = 0; kind < kOpKinds; ++kind) {
      const KindSet bit = kind_bit(static_cast<OpKind>(kind));
      if (((apart ? allowed : entry.lane->kinds()) & bit) == 0) continue;
      const auto& runnable = queues_[static_cast<size_t>(kind)].runnable[static_cast<size_t>(priority)];
      if (runnable.empty()) continue;
      found = true;
      if ((allowed & bit) == 0) continue;
      OpState* first = runnable.begin()->second;
      if (oldest == nullptr || first->sequence() < oldest->sequence()) oldest = first;
    }
    if (!found) continue;
    if (!urgent_found) {
      urgent_found = true;
      urgent = oldest;
    } else {
      patient_found = true;
      const bool older =
          oldest != nullptr && (patient == nullptr || oldest->sequence() < patient->sequence());
      if (older) patient = oldest;
    }
  }
  if (!patient_found) {
    streak = 0;
    return urgent;
  }
  if (streak >= kPiecesBeforeAged && patient != nullptr) {
    streak = 0;
    return patient;
  }
  if (urgent != nullptr) ++streak;
  return urgent;
}

std::shared_ptr<WorkItem> Scheduler::take_locked(int32_t lane, KindSet allowed) {
  OpState* op = pick(*lanes_[static_cast<size_t>(lane)], allowed);
  return op == nullptr ? nullptr : take_of(*op, lane);
}

std::shared_ptr<WorkItem> Scheduler::take_of(OpState& chosen, int32_t lane) {
  OpState* op = &chosen;
  auto item = std::make_shared<WorkItem>();
  item->op_ = op->shared_from_this();
  const Lane& taker = *lanes_[static_cast<size_t>(lane)]->lane;
  auto [first_stage, last_stage, positions] = op->take(taker.item_bytes(), taker.takes_all_stages());
  item->first_stage_ = first_stage;
  item->last_stage_ = last_stage;
  item->view_ = op->view();
  item->kind_ = op->spec().kind;
  item->lane_ = lane;
  item->positions_ = std::move(positions);
  item->unfinished_ = item->positions_.size();
  item->touch();
  update_runnable(*op);
  moving_.insert(item);
  if (watchdog_idle_) watchdog_.notify_one();
  return item;
}

std::shared_ptr<WorkItem> Scheduler::try_take(int32_t lane, KindSet allowed) {
  const std::lock_guard lock(mutex_);
  return closing_ ? nullptr : take_locked(lane, allowed);
}

std::shared_ptr<WorkItem> Scheduler::try_take_expedited(int32_t lane) {
  const std::lock_guard lock(mutex_);
  if (closing_ || expedited_.empty()) return nullptr;
  for (const auto& op : expedited_) {
    if (queue_of(*op).lane != lane || !op->has_ready()) continue;
    return take_of(*op, lane);
  }
  return nullptr;
}

std::shared_ptr<WorkItem> Scheduler::take(int32_t lane) {
  std::unique_lock lock(mutex_);
  LaneEntry& entry = *lanes_[static_cast<size_t>(lane)];
  for (;;) {
    if (closing_) return nullptr;
    if (auto item = take_locked(lane, entry.lane->kinds())) return item;
    ++entry.idle;
    entry.work.wait(lock);
    --entry.idle;
    if (entry.woken > 0) --entry.woken;
  }
}

bool Scheduler::extend(const std::shared_ptr<WorkItem>& item) {
  const std::lock_guard lock(mutex_);
  OpState& op = *item->op_;
  if (closing_ || op.cancelled || item->advanced_ || !queue_of(op).up) return false;
  const int32_t last = op.last_free(item->positions_, item->last_stage_);
  return std::exchange(item->last_stage_, last) < last;
}

void Scheduler::issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
                       std::span<const std::shared_ptr<StreamEvent>> events) {
  // The old events, which `events` replaces. They are destroyed after the lock is released, because
  // destroying an event calls the driver.
  std::vector<std::shared_ptr<StreamEvent>> replaced;
  const std::lock_guard lock(mutex_);
  OpState& op = *item->op_;
  for (const int32_t page : item->positions_) op.mark_issued(page, stage);
  replaced.push_back(std::exchange(op.last_event, events.back()));
  bool all = false;
  for (int32_t one = item->first_stage_ + item->issued_stages_; one <= stage; ++one) {
    const size_t from_last = std::min(static_cast<size_t>(stage - one), events.size() - 1);
    const auto& event = events[events.size() - 1 - from_last];
    replaced.push_back(std::exchange(op.stage_events[static_cast<size_t>(one)], event));
    all |= op.stage_issued(one);
  }
  item->issued_stages_ = std::max(item->issued_stages_, stage + 1 - item->first_stage_);
  if (all || op.all_issued()) progress_.notify_all();
}

void Scheduler::passed(const std::shared_ptr<WorkItem>& item, int32_t stage) {
  const std::lock_guard lock(mutex_);
  OpState& op = *item->op_;
  bool done = false;
  for (const int32_t page : item->positions_) {
    if (op.state(page) == PageState::kMoving) done |= op.pass(page, stage);
  }
  if (done) progress_.notify_all();
}

void Scheduler::finish(const std::shared_ptr<WorkItem>& item, const std::vector<MoveResult>& results) {
  std::vector<size_t> all(item->positions_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  finish_pages(item, all, results);
}

void Scheduler::finish_pages(const std::shared_ptr<WorkItem>& item, const std::vector<size_t>& indices,
                             const std::vector<MoveResult>& results) {
  const std::lock_guard lock(mutex_);
  if (moving_.count(item) == 0 || indices.size() > item->unfinished_)
    throw ContractError("a lane finished an item that it had not taken");
  if (results.size() != indices.size()) throw ContractError("a lane must give one result for each page");
  item->unfinished_ -= indices.size();
  item->touch();
  OpState& op = *item->op_;
  if (item->unfinished_ == 0) {
    moving_.erase(item);
    // The item must release the view before the result is visible, because a caller that sees the result may
    // detach the view and free the memory that the view refers to.
    item->view_.reset();
    if (item->stuck_) revive();
  }
  const KindQueue& queue = queue_of(op);
  bool layer_done = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const int32_t page = item->positions_[indices[i]];
    if (results[i].status != Status::kOk) {
      end_page(op, page, bad_state(results[i].status), results[i].reason, results[i].cause);
      continue;
    }
    op.keep_digests(page, results[i].digests);
    item->advanced_ = true;
    layer_done |= op.advance(page, item->last_stage_);
    if (op.state(page) == PageState::kOk) {
      page_arrived(op, page);
    } else if (op.cancelled) {
      end_page(op, page, PageState::kCancelled, "cancelled");
    } else if (!queue.up) {
      end_page(op, page, PageState::kLaneDown, queue.down_reason);
    } else {
      tell_layers_read(op, page);
    }
  }
  update_runnable(op);
  settle(op);
  carry_on();
  if (layer_done || moving_.empty()) progress_.notify_all();
}

std::vector<LaneState> Scheduler::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<LaneState> states;
  for (int i = 0; i < kOpKinds; ++i) {
    const KindQueue& queue = queues_[static_cast<size_t>(i)];
    if (queue.lane < 0) continue;
    LaneState& state = states.emplace_back();
    state.kind = static_cast<OpKind>(i);
    state.lane = lanes_[static_cast<size_t>(queue.lane)]->lane->name();
    state.up = queue.up;
    state.reason = queue.down_reason;
    state.open_ops = static_cast<int64_t>(queue.open.size());
    state.times_down = queue.times_down;
    for (const int32_t places : queue.places) state.held_places += places;
    for (const auto& item : moving_) {
      if (item->stuck_ && item->kind_ == state.kind) state.stuck.push_back(item->op_->spec().op_id);
    }
  }
  return states;
}

}  // namespace flexkv
