// The part of the scheduler for callers of the transfer engine: the functions that submit graphs, poll
// results, wait, cancel and close.
#include "transfer/scheduler.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>

#include "base/error.h"

namespace flexkv {
namespace {

// The kinds of op that read the inference engine's blocks and store them.
constexpr KindSet kStoreKinds = kind_bit(OpKind::kD2H) | kind_bit(OpKind::kGdsWrite);

// Unit: seconds. An event that is not reached after this time is assumed to wait behind other work on its
// stream. An event that was just recorded on an idle stream is reached after some microseconds.
constexpr double kIdleStreamS = 0.001;

bool is_reached(StreamEvent& event) {
  const auto deadline = deadline_in(kIdleStreamS);
  while (!event.reached()) {
    if (seconds_until(deadline) <= 0) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

int open_event_fd() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw CapacityError(std::string("eventfd: ") + std::strerror(errno));
  return fd;
}

}  // namespace

Scheduler::Scheduler(int32_t queue_ops, double op_stuck_s)
    : queue_ops_(queue_ops), op_stuck_s_(op_stuck_s), event_fd_(open_event_fd()) {}

Scheduler::~Scheduler() { ::close(event_fd_); }

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
                                         const std::vector<std::shared_ptr<const AttachedView>>& views,
                                         const std::vector<PageSizes>& sizes) {
  std::vector<Graph> forgotten;
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
        std::make_shared<OpState>(std::move(spec.ops[i]), ticket, next_sequence_++, views[i], sizes[i]));
    op->fence = spec.fence;
    if (spec.gated) op->gate();
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
  for (const auto& op : graph.ops) {
    Coming coming{op, {}};
    for (size_t page = 0; page < op->spec().reads.size(); ++page) {
      if (op->spec().reads[page] != kNoRead) coming.pages.push_back(static_cast<int32_t>(page));
    }
    if (!coming.pages.empty()) coming_.push_back(std::move(coming));
  }
  // An op is at least as urgent as the ops that wait for it, for example a load op. Edges point forward, so
  // this loop over the ops from last to first visits each op after its successors.
  for (auto op = graph.ops.rbegin(); op != graph.ops.rend(); ++op) {
    for (const auto& [after, kind] : (*op)->successors) {
      (*op)->effective_priority = std::min((*op)->effective_priority, after->effective_priority);
    }
  }
  for (const auto& op : graph.ops) {
    const KindQueue& queue = queue_of(*op);
    if (op->ended) continue;  // an op without pages may already have ended when an earlier op ended
    if (!queue.up) {
      end_all_pages(*op, PageState::kLaneDown, queue.down_reason);
    } else {
      start_if_free(*op);
    }
    carry_on();
  }
  if (graph.ops.empty()) remember(ticket, forgotten);
  if (!coming_.empty()) {
    look_for_arrivals();  // some slots may already be filled
    arrivals_.notify_one();
  }
  return ticket;
}

std::vector<OpResult> Scheduler::poll(size_t max_results) {
  std::vector<Graph> forgotten;
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
    if (--graph.unpolled == 0) remember(result.ticket, forgotten);
  }
  has_results_ = !results_.empty();
  if (!taken.empty() && results_.empty()) {
    uint64_t count = 0;
    // The read fails only if a caller has read the descriptor, against the contract. The counter is then
    // already 0, as intended, so the failure is ignored and `taken` is returned.
    [[maybe_unused]] const auto bytes = read(event_fd_, &count, sizeof(count));
  }
  return taken;
}

void Scheduler::remember(int64_t ticket, std::vector<Graph>& forgotten) {
  remembered_.push_back(ticket);
  if (remembered_.size() <= kRememberedGraphs) return;
  forgotten.push_back(std::move(graphs_.extract(remembered_.front()).mapped()));
  remembered_.pop_front();
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

LayerWait Scheduler::wait_layer(int64_t ticket, int32_t layer, double deadline_s, bool issued) {
  // shared_ptr, because the scheduler may forget the graph during the wait.
  std::vector<std::shared_ptr<OpState>> loads;
  std::unique_lock lock(mutex_);
  require_given(ticket, "wait_layer");
  const auto found = graphs_.find(ticket);
  if (found == graphs_.end()) {
    throw ContractError("wait_layer(" + std::to_string(ticket) +
                        "): that graph ended long ago and was forgotten");
  }
  const auto find_loads = [&](KindSet kinds) {
    for (const auto& op : found->second.ops) {
      if ((kinds & kind_bit(op->spec().kind)) != 0) loads.push_back(op);
    }
  };
  find_loads(kind_bit(OpKind::kH2D) | kind_bit(OpKind::kGdsRead));
  // If the graph only reads from disk to host memory, a layer is in place when it has been read.
  if (loads.empty()) find_loads(kind_bit(OpKind::kDiskRead));
  int32_t layers = loads.empty() ? INT32_MAX : 0;
  for (const auto& op : loads) layers = std::max(layers, op->layers());
  if (layer < 0 || layer >= layers) {
    throw BlockRangeError("wait_layer: layer " + std::to_string(layer) +
                          ": the graph's loads have layers [0, " + std::to_string(layers) + ")");
  }
  LayerWait answer;
  answer.in_time = progress_.wait_until(lock, deadline_in(deadline_s), [&] {
    return std::all_of(loads.begin(), loads.end(), [&](const auto& op) {
      return issued ? op->stage_issued(op->stage_of(layer)) : op->stage_done(op->stage_of(layer));
    });
  });
  for (const auto& op : loads) {
    if (!issued) break;
    const auto stage = static_cast<size_t>(op->stage_of(layer));
    if (const auto& event = op->stage_events[stage]) answer.events.emplace_back(op->spec().kind, event);
  }
  for (const auto& op : loads) {
    if (auto failed = op->failed_pages(); !failed.empty()) {
      answer.failed.emplace_back(op->spec().op_id, std::move(failed));
    }
  }
  return answer;
}

// Returns the op's own fence and the fences of the work items that its lane has in flight, because the op's
// copies may have to wait behind these items. Fences of older ops that are still queued are not included.
std::vector<std::shared_ptr<StreamEvent>> Scheduler::fences_before(const OpState& op) const {
  std::vector<std::shared_ptr<StreamEvent>> fences;
  if (op.fence) fences.push_back(op.fence);
  for (const auto& item : moving_) {
    if (item->lane_ == queues_[static_cast<size_t>(op.spec().kind)].lane && item->fence()) {
      fences.push_back(item->fence());
    }
  }
  return fences;
}

Scheduler::Enqueued Scheduler::enqueue_all(int64_t ticket, double deadline_s, bool on_streams) {
  // shared_ptr, because the scheduler may forget the graph during the wait.
  std::vector<std::shared_ptr<OpState>> stores;
  std::vector<std::shared_ptr<StreamEvent>> fences;
  std::unique_lock lock(mutex_);
  require_given(ticket, "order_after");
  const auto found = graphs_.find(ticket);
  if (found == graphs_.end()) return {true, {}};  // the graph has finished and is no longer remembered
  for (const auto& op : found->second.ops) {
    if ((kStoreKinds & kind_bit(op->spec().kind)) != 0 && !op->ended) stores.push_back(op);
  }
  for (const auto& op : stores) {
    if (!on_streams || op->spec().kind != OpKind::kD2H || op->expedited()) continue;
    op->expedite();
    expedited_.push_back(op);
    lane_of(*op).wake(op->spec().kind);
  }
  Enqueued answer;
  for (const auto& op : stores) {
    if (!on_streams || op->spec().kind != OpKind::kGdsWrite || deadline_s <= 0) continue;
    std::ranges::move(fences_before(*op), std::back_inserter(fences));
  }
  if (!fences.empty()) {
    lock.unlock();  // is_reached() calls the driver, so it is called without the lock
    answer.behind_forward =
        !std::all_of(fences.begin(), fences.end(), [](const auto& fence) { return is_reached(*fence); });
    lock.lock();
    if (answer.behind_forward) deadline_s = 0;
  }
  // On a lane without streams, all_issued() is true only when all pages have finished.
  answer.in_time = progress_.wait_until(lock, deadline_in(deadline_s), [&] {
    return std::all_of(stores.begin(), stores.end(),
                       [](const auto& op) { return op->ended || op->all_issued(); });
  });
  for (const auto& op : stores) {
    if (!op->ended && op->last_event) answer.events.emplace_back(op->spec().kind, op->last_event);
  }
  return answer;
}

void Scheduler::open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                            const std::shared_ptr<StreamEvent>& fence) {
  const std::lock_guard lock(mutex_);
  for (const int64_t ticket : tickets) {
    require_given(ticket, "open_layers");
    const auto found = graphs_.find(ticket);
    int32_t most = found == graphs_.end() ? INT32_MAX : 0;
    for (size_t i = 0; most < INT32_MAX && i < found->second.ops.size(); ++i) {
      most = std::max(most, found->second.ops[i]->layers());
    }
    if (layers < 0 || layers > most) {
      throw BlockRangeError("open_layers(" + std::to_string(ticket) + "): " + std::to_string(layers) +
                            " layers; allowed are 0 to " + std::to_string(most));
    }
  }
  for (const int64_t ticket : tickets) {
    const auto found = graphs_.find(ticket);
    if (found == graphs_.end()) continue;
    for (const auto& op : found->second.ops) {
      if (op->ended) continue;
      op->open(layers, fence);
      update_runnable(*op);
      wake_lane_of_moving(*op);
    }
  }
}

int64_t Scheduler::cancel(int64_t ticket) {
  const std::lock_guard lock(mutex_);
  require_given(ticket, "cancel");
  const auto found = graphs_.find(ticket);
  if (found == graphs_.end()) return 0;
  int64_t dropped = 0;
  const std::vector<std::shared_ptr<OpState>>& ops = found->second.ops;
  // Cancels each op after its successors, so that the successors' pages count as cancelled and not as
  // skipped.
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    if ((*op)->ended) continue;
    (*op)->cancelled = (*op)->unwanted = true;
    const auto before = static_cast<int64_t>((*op)->failed_pages().size());
    end_all_pages(**op, PageState::kCancelled, "cancelled");
    dropped += static_cast<int64_t>((*op)->failed_pages().size()) - before;
    wake_lane_of_moving(**op);
    carry_on();
  }
  return dropped;
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
    wake_lane_of_moving(**op);
    carry_on();
  }
  for (const auto& entry : lanes_) entry->work.notify_all();
  watchdog_.notify_all();
  arrivals_.notify_all();
}

bool Scheduler::wait_quiet(double deadline_s) {
  std::unique_lock lock(mutex_);
  return progress_.wait_until(lock, deadline_in(deadline_s), [&] { return moving_.empty(); });
}

bool Scheduler::closing() const {
  const std::lock_guard lock(mutex_);
  return closing_;
}

}  // namespace flexkv
