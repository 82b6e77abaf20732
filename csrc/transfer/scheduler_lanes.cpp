// The lanes' side of the scheduler: handing out pieces, taking their results, and finding those that hang.
#include <algorithm>
#include <numeric>
#include <tuple>

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

PageMove Piece::page(size_t index) const {
  const OpSpec& spec = op_->spec();
  const int32_t position = positions_[index];
  const auto at = static_cast<size_t>(position);
  PageMove move;
  move.op_id = spec.op_id;
  move.kind = kind_;
  move.position = position;
  move.block = spec.blocks.empty() ? -1 : spec.blocks[at];
  move.slot = spec.slots.empty() ? -1 : spec.slots[at];
  move.view = view_.get();
  move.group = spec.group;
  if (!spec.places.empty()) {
    move.place = spec.places[at];
    move.tag = spec.tags.data() + at * kTagBytes;
    const size_t digests = spec.digests.size() / spec.places.size();
    move.digests = std::span(spec.digests).subspan(at * digests, digests);
  }
  return move;
}

PageSizes Lane::check(const OpSpec& op) const {
  throw ContractError(std::string("lane ") + name() + " needs a view for " + to_string(op.kind));
}

const std::shared_ptr<StreamEvent>& Piece::fence() const { return op_->fence_of(stage_); }

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

// The op that lane runs next: the oldest of the most urgent, unless a less urgent one has waited its turn
// out. Null also when its turn has come, but its kind is not `allowed`.
OpState* Scheduler::pick(LaneEntry& entry, KindSet allowed) {
  OpState* urgent = nullptr;
  OpState* patient = nullptr;  // the oldest that is less urgent
  bool urgent_found = false;
  bool patient_found = false;
  for (int priority = 0; priority < kPriorities; ++priority) {
    OpState* oldest = nullptr;
    bool found = false;
    for (int kind = 0; kind < kOpKinds; ++kind) {
      const KindSet bit = kind_bit(static_cast<OpKind>(kind));
      if ((entry.lane->kinds() & bit) == 0) continue;
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
    entry.urgent_streak = 0;
    return urgent;
  }
  if (entry.urgent_streak >= kPiecesBeforeAged && patient != nullptr) {
    entry.urgent_streak = 0;
    return patient;
  }
  if (urgent != nullptr) ++entry.urgent_streak;
  return urgent;
}

std::shared_ptr<Piece> Scheduler::take_locked(int32_t lane, KindSet allowed) {
  OpState* op = pick(*lanes_[static_cast<size_t>(lane)], allowed);
  if (op == nullptr) return nullptr;
  auto piece = std::make_shared<Piece>();
  piece->op_ = op->shared_from_this();
  auto [stage, positions] = op->take(kSubBatchBytes);
  piece->stage_ = stage;
  std::tie(piece->layer_lo_, piece->layer_hi_) = op->layers_of(stage);
  piece->view_ = op->view();
  piece->kind_ = op->spec().kind;
  piece->lane_ = lane;
  piece->positions_ = std::move(positions);
  piece->unfinished_ = piece->positions_.size();
  piece->touch();
  update_runnable(*op);
  moving_.insert(piece);
  if (watchdog_idle_) watchdog_.notify_one();
  return piece;
}

std::shared_ptr<Piece> Scheduler::try_take(int32_t lane, KindSet allowed) {
  const std::lock_guard lock(mutex_);
  return closing_ ? nullptr : take_locked(lane, allowed);
}

std::shared_ptr<Piece> Scheduler::take(int32_t lane) {
  std::unique_lock lock(mutex_);
  LaneEntry& entry = *lanes_[static_cast<size_t>(lane)];
  for (;;) {
    if (closing_) return nullptr;
    if (auto piece = take_locked(lane, entry.lane->kinds())) return piece;
    ++entry.idle;
    entry.work.wait(lock);
    --entry.idle;
    if (entry.woken > 0) --entry.woken;
  }
}

void Scheduler::issued(const std::shared_ptr<Piece>& piece, std::shared_ptr<StreamEvent> event) {
  const std::lock_guard lock(mutex_);
  OpState& op = *piece->op_;
  for (const int32_t page : piece->positions_) op.mark_issued(page);
  op.stage_events[static_cast<size_t>(piece->stage_)] = std::move(event);
  if (op.stage_issued(piece->stage_)) progress_.notify_all();
}

void Scheduler::finish(const std::shared_ptr<Piece>& piece, const std::vector<MoveResult>& results) {
  std::vector<size_t> all(piece->positions_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  finish_pages(piece, all, results);
}

void Scheduler::finish_pages(const std::shared_ptr<Piece>& piece, const std::vector<size_t>& indices,
                             const std::vector<MoveResult>& results) {
  const std::lock_guard lock(mutex_);
  if (moving_.count(piece) == 0 || indices.size() > piece->unfinished_)
    throw ContractError("a lane finished a piece that it had not taken");
  if (results.size() != indices.size()) throw ContractError("a lane must give one result for each page");
  piece->unfinished_ -= indices.size();
  piece->touch();
  OpState& op = *piece->op_;
  if (piece->unfinished_ == 0) {
    moving_.erase(piece);
    // Before the result can be seen: whoever then detaches the view may free its memory.
    piece->view_.reset();
    if (piece->stuck_) revive();
  }
  const KindQueue& queue = queue_of(op);
  bool layer_done = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const int32_t page = piece->positions_[indices[i]];
    if (results[i].status != Status::kOk) {
      end_page(op, page, bad_state(results[i].status), results[i].reason, results[i].blame);
      continue;
    }
    op.keep_digests(page, results[i].digests);
    layer_done |= op.advance(page);
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
    for (const auto& piece : moving_) {
      if (piece->stuck_ && piece->kind_ == state.kind) state.stuck.push_back(piece->op_->spec().op_id);
    }
  }
  return states;
}

void Scheduler::take_down(OpKind kind, const std::string& reason) {
  KindQueue& queue = queues_[static_cast<size_t>(kind)];
  if (!queue.up) return;
  queue.up = false;
  queue.down_reason = reason;
  ++queue.times_down;
  const std::map<uint64_t, OpState*> open = queue.open;  // a copy: ops end meanwhile
  for (const auto& [sequence, op] : open) {
    if (queue.open.count(sequence) == 0) continue;
    end_all_pages(*op, PageState::kLaneDown, reason);
    carry_on();
  }
}

// Takes down what stuck pieces stand for: their kind, and all kinds of a lane that has no room left beside
// them.
void Scheduler::look_for_stuck() {
  std::map<int32_t, int32_t> stuck_of_lane;
  bool moved_again = false;
  for (const auto& piece : moving_) {
    const Clock::rep moved = piece->last_moved_.load(std::memory_order_relaxed);
    piece->quiet_looks_ = moved == piece->seen_moved_ ? piece->quiet_looks_ + 1 : 0;
    piece->seen_moved_ = moved;
    const bool was_stuck = piece->stuck_;
    piece->stuck_ = piece->quiet_looks_ >= kLooksUntilStuck;
    moved_again |= was_stuck && !piece->stuck_;
    if (piece->stuck_) ++stuck_of_lane[piece->lane_];
  }
  // Ending pages below changes no piece under way, so `moving_` stays as it is.
  for (const auto& piece : moving_) {
    if (!piece->stuck_) continue;
    const LaneEntry& entry = *lanes_[static_cast<size_t>(piece->lane_)];
    if (entry.lane->watches_itself()) continue;
    const std::string reason = std::string("lane ") + to_string(piece->kind_) + " is down: op " +
                               std::to_string(piece->op_->spec().op_id) + " has not moved for " +
                               std::to_string(op_stuck_s_) + " s";
    take_down(piece->kind_, reason);
    if (stuck_of_lane[piece->lane_] < entry.lane->concurrency()) continue;
    // Nothing that shares its threads can move either.
    for (int kind = 0; kind < kOpKinds; ++kind) {
      const bool shares = (entry.lane->kinds() & kind_bit(static_cast<OpKind>(kind))) != 0;
      if (shares) take_down(static_cast<OpKind>(kind), reason);
    }
  }
  if (moved_again) revive();
}

// Takes kinds into service again that nothing stuck stands for any more. `moving_` no longer has what has
// ended.
void Scheduler::revive() {
  for (int kind = 0; kind < kOpKinds; ++kind) {
    KindQueue& queue = queues_[static_cast<size_t>(kind)];
    if (queue.up || queue.lane < 0) continue;
    int32_t stuck = 0;
    bool of_this_kind = false;
    for (const auto& piece : moving_) {
      if (!piece->stuck_ || piece->lane_ != queue.lane) continue;
      ++stuck;
      of_this_kind |= piece->kind_ == static_cast<OpKind>(kind);
    }
    const Lane& lane = *lanes_[static_cast<size_t>(queue.lane)]->lane;
    if (of_this_kind || stuck >= lane.concurrency()) continue;
    queue.up = true;
    queue.down_reason.clear();
  }
}

// Whether pages of it still wait.
bool Scheduler::look_for_arrivals(Coming& coming) {
  OpState& op = *coming.op;
  if (op.ended) return false;
  const SlotStates states = op.view()->pool().slot_states();
  std::vector<int32_t> waiting;
  for (const int32_t page : coming.pages) {
    if (!is_open(op.state(page))) continue;  // cancelled, or its copy failed
    const auto at = static_cast<size_t>(page);
    const int64_t read = op.spec().reads[at];
    const SlotArrival arrival = states.look(op.spec().slots[at], read);
    if (!arrival.failed) {
      op.arrive(page, arrival.layers);
      make_ready(op, page);
      if (arrival.layers < op.layers()) waiting.push_back(page);
    } else if (op.state(page) == PageState::kMoving) {
      waiting.push_back(page);  // a layer of it that had verified is being copied: ends after that
    } else {
      end_page(
          op, page, PageState::kSkipped,
          "page " + std::to_string(page) + " did not come up from disk (read " + std::to_string(read) + ")");
    }
  }
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
