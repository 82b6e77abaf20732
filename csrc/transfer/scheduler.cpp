#include "transfer/scheduler.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace flexkv {
namespace {

int open_event_fd() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw CapacityError(std::string("eventfd: ") + std::strerror(errno));
  return fd;
}

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
  return {spec.op_id,     kind_,      position, spec.blocks.empty() ? -1 : spec.blocks[at],
          spec.slots[at], view_.get()};
}

Scheduler::Scheduler(int32_t queue_ops, double op_stuck_s)
    : queue_ops_(queue_ops), op_stuck_s_(op_stuck_s), event_fd_(open_event_fd()) {}

Scheduler::~Scheduler() { ::close(event_fd_); }

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

bool Scheduler::places_free(const GraphSpec& graph) const {
  std::array<std::array<int32_t, kPriorities>, kOpKinds> needed{};
  for (const OpSpec& op : graph.ops) {
    const auto kind = static_cast<size_t>(op.kind);
    const auto priority = static_cast<size_t>(op.priority);
    const int32_t places = ++needed[kind][priority];
    if (places > queue_ops_) {
      throw ContractError("a graph with more than " + std::to_string(queue_ops_) + " " + to_string(op.kind) +
                          " ops of one priority never fits the queue");
    }
    if (queues_[kind].places[priority] + places > queue_ops_) return false;
  }
  return true;
}

std::optional<int64_t> Scheduler::submit(GraphSpec spec,
                                         const std::vector<std::shared_ptr<const AttachedView>>& views) {
  const std::lock_guard lock(mutex_);
  if (closing_) throw ClosedError("submit: the transfer engine was closed");
  std::unordered_set<int64_t> own_ids;
  for (const OpSpec& op : spec.ops) {
    if (op_ids_.count(op.op_id) != 0 || !own_ids.insert(op.op_id).second) {
      throw ContractError("op id " + std::to_string(op.op_id) + " is in flight already");
    }
  }
  if (!places_free(spec)) return std::nullopt;

  const int64_t ticket = next_ticket_++;
  Graph& graph = graphs_[ticket];
  graph.open = graph.unpolled = spec.ops.size();
  op_ids_.merge(own_ids);
  for (size_t i = 0; i < spec.ops.size(); ++i) {
    auto& op = graph.ops.emplace_back(
        std::make_shared<OpState>(std::move(spec.ops[i]), ticket, next_sequence_++, views[i]));
    KindQueue& queue = queue_of(*op);
    ++queue.places[static_cast<size_t>(op->spec().priority)];
    queue.open.emplace(op->sequence(), op.get());
  }
  for (const EdgeSpec& edge : spec.edges) {
    OpState& before = *graph.ops[static_cast<size_t>(edge.before)];
    OpState& after = *graph.ops[static_cast<size_t>(edge.after)];
    before.successors.emplace_back(&after, edge.kind);
    if (edge.kind == EdgeKind::kBarrier) {
      ++after.waiting_barriers;
    } else {
      after.waiting_streams.resize(static_cast<size_t>(after.pages()));
      for (int32_t& count : after.waiting_streams) ++count;
    }
  }
  // What a load waits for runs as early as the load: edges point forward, so from the back all is known.
  for (auto op = graph.ops.rbegin(); op != graph.ops.rend(); ++op) {
    for (const auto& [after, kind] : (*op)->successors) {
      (*op)->effective_priority = std::min((*op)->effective_priority, after->effective_priority);
    }
  }
  // A copy: an op that ends here and now may end the graph.
  const std::vector<std::shared_ptr<OpState>> ops = graph.ops;
  for (const auto& op : ops) {
    const KindQueue& queue = queue_of(*op);
    if (op->ended) continue;
    if (!queue.up) {
      end_all_pages(*op, PageState::kLaneDown, queue.down_reason);
    } else {
      start_if_free(*op);
    }
  }
  return ticket;
}

void Scheduler::start_if_free(OpState& op) {
  if (op.waiting_barriers > 0 || op.ended) return;
  for (int32_t page = 0; page < op.pages(); ++page) {
    make_ready(op, page);
  }
  update_runnable(op);
  settle(op);  // one without pages is done
}

// Makes a waiting page ready if nothing holds it back.
bool Scheduler::make_ready(OpState& op, int32_t page) {
  if (op.state(page) != PageState::kWaiting || op.waiting_barriers > 0) return false;
  if (!op.waiting_streams.empty() && op.waiting_streams[static_cast<size_t>(page)] > 0) return false;
  op.make_ready(page);
  return true;
}

// Keeps `runnable` exactly the ops with ready pages, and tells the lane.
void Scheduler::update_runnable(OpState& op) {
  KindQueue& queue = queue_of(op);
  auto& runnable = queue.runnable[static_cast<size_t>(op.effective_priority)];
  if (!op.has_ready()) {
    runnable.erase(op.sequence());
    return;
  }
  LaneEntry& entry = *lanes_[static_cast<size_t>(queue.lane)];
  if (runnable.emplace(op.sequence(), &op).second) entry.lane->wake();
  if (entry.idle > entry.woken) {
    ++entry.woken;
    entry.work.notify_one();
  }
}

void Scheduler::end_page(OpState& op, int32_t page, PageState end, const std::string& reason) {
  op.fail(page, end, reason);
  update_runnable(op);
  progress_.notify_all();  // a layer may be over with it
  for (const auto& [after, kind] : op.successors) {
    if (kind == EdgeKind::kStream && after->state(page) == PageState::kWaiting) {
      end_page(*after, page, PageState::kSkipped,
               "page " + std::to_string(page) + " of op " + std::to_string(op.spec().op_id) +
                   ", which it waits for: " + reason);
      settle(*after);
    }
  }
}

// Ends what has not been taken by a lane; pages under way end when their piece does.
void Scheduler::end_all_pages(OpState& op, PageState end, const std::string& reason) {
  if (op.ended) return;
  if (op.pages() == 0) op.fail_empty(end, reason);
  for (int32_t page = op.pages() - 1; page >= 0; --page) {  // backwards: see OpState::fail
    const PageState state = op.state(page);
    if (state == PageState::kWaiting || state == PageState::kReady) end_page(op, page, end, reason);
  }
  op.waiting_barriers = 0;
  settle(op);
}

// A page ended OK: its successors' pages may start.
void Scheduler::page_arrived(OpState& op, int32_t page) {
  for (const auto& [after, kind] : op.successors) {
    if (kind != EdgeKind::kStream) continue;
    --after->waiting_streams[static_cast<size_t>(page)];
    if (make_ready(*after, page)) update_runnable(*after);
  }
}

// Ends an op whose pages have all ended, and passes that on along its barriers.
void Scheduler::settle(OpState& op) {
  if (op.ended || !op.all_settled() || op.waiting_barriers > 0) return;
  op.ended = true;
  OpResult result = op.result();
  const bool ok = result.status == Status::kOk;
  const std::string why = "op " + std::to_string(op.spec().op_id) + ", which it waits for: " + result.reason;
  KindQueue& queue = queue_of(op);
  queue.open.erase(op.sequence());
  op.release_view();
  --graphs_.at(op.ticket()).open;
  results_.emplace_back(std::move(result), op.shared_from_this());
  if (results_.size() == 1) {
    const uint64_t one = 1;
    // The counter is 0 or 1, so this cannot block or fail.
    if (write(event_fd_, &one, sizeof(one)) != sizeof(one)) throw ContractError("eventfd write");
  }
  progress_.notify_all();
  for (const auto& [after, kind] : op.successors) {
    if (kind != EdgeKind::kBarrier || after->ended) continue;
    if (ok) {
      --after->waiting_barriers;
      start_if_free(*after);
    } else {
      end_all_pages(*after, PageState::kSkipped, why);
    }
  }
}

std::vector<OpResult> Scheduler::poll(size_t max_results) {
  const std::lock_guard lock(mutex_);
  std::vector<OpResult> taken;
  while (!results_.empty() && taken.size() < max_results) {
    OpState& op = *results_.front().second;
    --queue_of(op).places[static_cast<size_t>(op.spec().priority)];
    op_ids_.erase(op.spec().op_id);
    taken.push_back(std::move(results_.front().first));
    results_.pop_front();
    const OpResult& result = taken.back();
    Graph& graph = graphs_.at(result.ticket);
    if (--graph.unpolled == 0) {
      remembered_.push_back(result.ticket);
      if (remembered_.size() > kRememberedGraphs) {
        graphs_.erase(remembered_.front());
        remembered_.pop_front();
      }
    }
  }
  if (!taken.empty() && results_.empty()) {
    uint64_t count = 0;
    if (read(event_fd_, &count, sizeof(count)) != sizeof(count)) throw ContractError("eventfd read");
  }
  return taken;
}

void Scheduler::require_given(int64_t ticket, const char* what) const {
  if (ticket >= 1 && ticket < next_ticket_) return;
  throw ContractError(std::string(what) + "(" + std::to_string(ticket) + "): tickets given are [1, " +
                      std::to_string(next_ticket_) + ")");
}

bool Scheduler::wait(int64_t ticket, double deadline_s) {
  std::unique_lock lock(mutex_);
  require_given(ticket, "wait");
  return progress_.wait_until(lock, deadline_in(deadline_s), [&] {
    const auto found = graphs_.find(ticket);
    return found == graphs_.end() || found->second.open == 0;
  });
}

LayerWait Scheduler::wait_layer(int64_t ticket, int32_t layer, double deadline_s) {
  std::unique_lock lock(mutex_);
  require_given(ticket, "wait_layer");
  const auto found = graphs_.find(ticket);
  if (found == graphs_.end()) {
    throw ContractError("wait_layer(" + std::to_string(ticket) +
                        "): that graph ended long ago and was forgotten");
  }
  std::vector<std::shared_ptr<OpState>> loads;  // held: the graph may be forgotten while this waits
  for (const auto& op : found->second.ops) {
    if (op->spec().kind == OpKind::kH2D || op->spec().kind == OpKind::kGdsRead) loads.push_back(op);
  }
  int32_t layers = loads.empty() ? INT32_MAX : 0;
  for (const auto& op : loads) layers = std::max(layers, op->layers());
  if (layer < 0 || layer >= layers) {
    throw BlockRangeError("wait_layer: layer " + std::to_string(layer) +
                          ": the graph's loads have layers [0, " + std::to_string(layers) + ")");
  }
  LayerWait answer;
  answer.in_time = progress_.wait_until(lock, deadline_in(deadline_s), [&] {
    return std::all_of(loads.begin(), loads.end(), [&](const auto& op) { return op->stage_done(layer); });
  });
  for (const auto& op : loads) {
    if (auto failed = op->failed_pages(); !failed.empty()) {
      answer.failed.emplace_back(op->spec().op_id, std::move(failed));
    }
  }
  return answer;
}

int64_t Scheduler::cancel(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  require_given(ticket, "cancel");
  const auto found = graphs_.find(ticket);
  if (found == graphs_.end()) return 0;
  int64_t dropped = 0;
  const std::vector<std::shared_ptr<OpState>> ops = found->second.ops;
  // Successors first, so that they end as cancelled and not as skipped.
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    if ((*op)->ended) continue;
    (*op)->cancelled = true;
    const auto before = static_cast<int64_t>((*op)->failed_pages().size());
    end_all_pages(**op, PageState::kCancelled, "cancelled");
    dropped += static_cast<int64_t>((*op)->failed_pages().size()) - before;
  }
  return dropped;
}

// The op that lane runs next: the oldest of the most urgent, unless a less urgent one has waited its turn
// out.
OpState* Scheduler::pick(LaneEntry& entry) {
  OpState* urgent = nullptr;
  OpState* patient = nullptr;  // the oldest that is less urgent
  for (int priority = 0; priority < kPriorities; ++priority) {
    OpState* oldest = nullptr;
    for (int kind = 0; kind < kOpKinds; ++kind) {
      if ((entry.lane->kinds() & kind_bit(static_cast<OpKind>(kind))) == 0) continue;
      const auto& runnable = queues_[static_cast<size_t>(kind)].runnable[static_cast<size_t>(priority)];
      if (runnable.empty()) continue;
      OpState* first = runnable.begin()->second;
      if (oldest == nullptr || first->sequence() < oldest->sequence()) oldest = first;
    }
    if (oldest == nullptr) continue;
    if (urgent == nullptr) {
      urgent = oldest;
    } else if (patient == nullptr || oldest->sequence() < patient->sequence()) {
      patient = oldest;
    }
  }
  if (patient == nullptr) {
    entry.urgent_streak = 0;
    return urgent;
  }
  if (entry.urgent_streak >= kPiecesBeforeAged) {
    entry.urgent_streak = 0;
    return patient;
  }
  ++entry.urgent_streak;
  return urgent;
}

std::shared_ptr<Piece> Scheduler::take_locked(int32_t lane) {
  OpState* op = pick(*lanes_[static_cast<size_t>(lane)]);
  if (op == nullptr) return nullptr;
  auto piece = std::make_shared<Piece>();
  piece->op_ = op->shared_from_this();
  auto [stage, positions] = op->take(kSubBatchBytes);
  std::tie(piece->layer_lo_, piece->layer_hi_) = op->layers_of(stage);
  piece->view_ = op->view();
  piece->kind_ = op->spec().kind;
  piece->lane_ = lane;
  piece->positions_ = std::move(positions);
  piece->touch();
  update_runnable(*op);
  moving_.insert(piece);
  if (watchdog_idle_) watchdog_.notify_one();
  return piece;
}

std::shared_ptr<Piece> Scheduler::try_take(int32_t lane) {
  const std::lock_guard lock(mutex_);
  return closing_ ? nullptr : take_locked(lane);
}

std::shared_ptr<Piece> Scheduler::take(int32_t lane) {
  std::unique_lock lock(mutex_);
  LaneEntry& entry = *lanes_[static_cast<size_t>(lane)];
  for (;;) {
    if (closing_) return nullptr;
    if (auto piece = take_locked(lane)) return piece;
    ++entry.idle;
    entry.work.wait(lock);
    --entry.idle;
    if (entry.woken > 0) --entry.woken;
  }
}

void Scheduler::finish(const std::shared_ptr<Piece>& piece, const std::vector<MoveResult>& results) {
  const std::lock_guard lock(mutex_);
  if (moving_.erase(piece) == 0) throw ContractError("a lane finished a piece that it had not taken");
  if (results.size() != piece->positions_.size())
    throw ContractError("a lane must give one result for each page");
  OpState& op = *piece->op_;
  const KindQueue& queue = queue_of(op);
  bool layer_done = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const int32_t page = piece->positions_[i];
    if (results[i].status != Status::kOk) {
      end_page(op, page, bad_state(results[i].status), results[i].reason);
      continue;
    }
    layer_done |= op.advance(page);
    if (op.state(page) == PageState::kOk) {
      page_arrived(op, page);
    } else if (op.cancelled) {
      end_page(op, page, PageState::kCancelled, "cancelled");
    } else if (!queue.up) {
      end_page(op, page, PageState::kLaneDown, queue.down_reason);
    }
  }
  update_runnable(op);
  settle(op);
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
    for (const int32_t places : queue.places) state.held_places += places;
    for (const auto& piece : moving_) {
      if (piece->stuck_ && piece->kind_ == state.kind) state.stuck.push_back(piece->op_->spec().op_id);
    }
  }
  return states;
}

void Scheduler::begin_close() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  std::vector<std::shared_ptr<OpState>> open;
  for (const auto& [ticket, graph] : graphs_) {
    for (const auto& op : graph.ops) {
      if (!op->ended) open.push_back(op);
    }
  }
  for (auto op = open.rbegin(); op != open.rend(); ++op) {
    (*op)->cancelled = true;
    end_all_pages(**op, PageState::kCancelled, "the transfer engine was closed");
  }
  for (const auto& entry : lanes_) {
    entry->work.notify_all();
    entry->lane->wake();
  }
  watchdog_.notify_all();
}

bool Scheduler::wait_quiet(double deadline_s) {
  std::unique_lock lock(mutex_);
  return progress_.wait_until(lock, deadline_in(deadline_s), [&] { return moving_.empty(); });
}

bool Scheduler::closing() const {
  const std::lock_guard lock(mutex_);
  return closing_;
}

void Scheduler::take_down(OpKind kind, const std::string& reason) {
  KindQueue& queue = queues_[static_cast<size_t>(kind)];
  if (!queue.up) return;
  queue.up = false;
  queue.down_reason = reason;
  const std::map<uint64_t, OpState*> open = queue.open;  // a copy: ops end meanwhile
  for (const auto& [sequence, op] : open) {
    if (queue.open.count(sequence) != 0) end_all_pages(*op, PageState::kLaneDown, reason);
  }
}

void Scheduler::watch() {
  const auto limit = to_duration(op_stuck_s_);
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (moving_.empty()) {
      watchdog_idle_ = true;
      watchdog_.wait(lock);
      watchdog_idle_ = false;
      continue;
    }
    const auto now = Clock::now();
    auto next = now + limit;
    std::map<int32_t, int32_t> stuck_of_lane;
    for (const auto& piece : moving_) {
      const Clock::time_point moved{Clock::duration(piece->last_moved_.load(std::memory_order_relaxed))};
      piece->stuck_ = now - moved >= limit;
      if (!piece->stuck_) {
        next = std::min(next, moved + limit);
        continue;
      }
      ++stuck_of_lane[piece->lane_];
    }
    // Ending pages below changes no piece under way, so `moving_` stays as it is.
    for (const auto& piece : moving_) {
      if (!piece->stuck_) continue;
      const LaneEntry& entry = *lanes_[static_cast<size_t>(piece->lane_)];
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
    watchdog_.wait_until(lock, next);
  }
}

}  // namespace flexkv
