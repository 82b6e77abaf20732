// The scheduler's periodic checks. One check looks for work items that hang. Another check looks for slots
// that other transfer engines have filled from disk.
#include <utility>

#include "transfer/scheduler.h"

namespace flexkv {

void Scheduler::take_down(OpKind kind, const std::string& reason) {
  KindQueue& queue = queues_[static_cast<size_t>(kind)];
  if (!queue.up) return;
  queue.up = false;
  queue.down_reason = reason;
  ++queue.times_down;
  const std::map<uint64_t, OpState*> open = queue.open;  // a copy, because the loop removes ops from the map
  for (const auto& [sequence, op] : open) {
    if (queue.open.count(sequence) == 0) continue;
    end_all_pages(*op, PageState::kLaneDown, reason);
    carry_on();
  }
}

// Takes down the kinds of op whose work items are stuck. If all items that a lane can have in flight are
// stuck, takes down all kinds of that lane. Kinds of a lane that watches itself are never taken down.
void Scheduler::look_for_stuck() {
  std::map<int32_t, int32_t> stuck_of_lane;
  bool moved_again = false;
  for (const auto& item : moving_) {
    const Clock::rep moved = item->last_moved_.load(std::memory_order_relaxed);
    item->quiet_looks_ = moved == item->seen_moved_ ? item->quiet_looks_ + 1 : 0;
    item->seen_moved_ = moved;
    const bool was_stuck = item->stuck_;
    item->stuck_ = item->quiet_looks_ >= kLooksUntilStuck;
    moved_again |= was_stuck && !item->stuck_;
    if (item->stuck_) ++stuck_of_lane[item->lane_];
  }
  // The loop ends pages but finishes no work item, so `moving_` does not change.
  for (const auto& item : moving_) {
    if (!item->stuck_) continue;
    const LaneEntry& entry = *lanes_[static_cast<size_t>(item->lane_)];
    if (entry.lane->watches_itself()) continue;
    const std::string reason = std::string("lane ") + to_string(item->kind_) + " is down: op " +
                               std::to_string(item->op_->spec().op_id) + " has not moved for " +
                               std::to_string(op_stuck_s_) + " s";
    take_down(item->kind_, reason);
    if (stuck_of_lane[item->lane_] < entry.lane->concurrency()) continue;
    // Stuck items occupy the lane completely, so that no other item can move.
    for (int kind = 0; kind < kOpKinds; ++kind) {
      const bool shares = (entry.lane->kinds() & kind_bit(static_cast<OpKind>(kind))) != 0;
      if (shares) take_down(static_cast<OpKind>(kind), reason);
    }
  }
  if (moved_again) revive();
}

// Brings up the kinds that have no stuck work item any more, if their lane can move other items again. An
// item that has finished does not count: it is not in `moving_` any more.
void Scheduler::revive() {
  for (int kind = 0; kind < kOpKinds; ++kind) {
    KindQueue& queue = queues_[static_cast<size_t>(kind)];
    if (queue.up || queue.lane < 0) continue;
    int32_t stuck = 0;
    bool of_this_kind = false;
    for (const auto& item : moving_) {
      if (!item->stuck_ || item->lane_ != queue.lane) continue;
      ++stuck;
      of_this_kind |= item->kind_ == static_cast<OpKind>(kind);
    }
    const Lane& lane = *lanes_[static_cast<size_t>(queue.lane)]->lane;
    if (of_this_kind || stuck >= lane.concurrency()) continue;
    queue.up = true;
    queue.down_reason.clear();
  }
}

// Starts the op's pages whose slots have been filled, and skips pages whose read failed. Returns whether any
// page of the op still has to wait.
bool Scheduler::look_for_arrivals(Coming& coming) {
  OpState& op = *coming.op;
  if (op.ended) return false;
  const SlotArrivals arrivals = op.view()->pool().slot_arrivals();
  std::vector<int32_t> waiting;
  bool advanced = false;
  for (const int32_t page : coming.pages) {
    if (!is_open(op.state(page))) continue;  // the page was cancelled, or its copy failed
    const auto at = static_cast<size_t>(page);
    const int64_t read = op.spec().reads[at];
    const SlotArrival arrival = arrivals.look(op.spec().slots[at], read);
    if (!arrival.failed) {
      advanced |= op.arrive(page, arrival.layers);
      make_ready(op, page);
      if (arrival.layers < op.layers()) waiting.push_back(page);
    } else if (op.state(page) == PageState::kMoving) {
      // An earlier layer is being copied; the page is skipped once that copy has ended.
      waiting.push_back(page);
    } else {
      end_page(
          op, page, PageState::kSkipped,
          "page " + std::to_string(page) + " was not read from disk (read " + std::to_string(read) + ")");
    }
  }
  if (advanced) wake_lane_of_moving(op);
  coming.pages = std::move(waiting);
  update_runnable(op);
  settle(op);
  carry_on();
  return !op.ended && !coming.pages.empty();
}

void Scheduler::look_for_arrivals() {
  coming_.remove_if([this](Coming& coming) { return !look_for_arrivals(coming); });
}

void Scheduler::watch_slots() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (coming_.empty()) {
      arrivals_.wait(lock);
      continue;
    }
    look_for_arrivals();
    arrivals_.wait_for(lock, to_duration(kSlotLookS), [this] { return closing_; });
  }
}

void Scheduler::watch() {
  const auto step = to_duration(op_stuck_s_ / kLooksUntilStuck);
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (moving_.empty()) {
      watchdog_idle_ = true;
      watchdog_.wait(lock);
      watchdog_idle_ = false;
      continue;
    }
    look_for_stuck();
    watchdog_.wait_for(lock, step, [this] { return closing_; });
  }
}

}  // namespace flexkv
