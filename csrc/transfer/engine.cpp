#include "transfer/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "base/error.h"
#include "layout/overlap.h"
#include "transfer/graph_check.h"
#include "transfer/host_lane.h"

namespace flexkv {
namespace {

// Unit: seconds. How long the destructor waits for work items in flight. Copying an item of 8 MiB takes about
// a millisecond.
constexpr double kDestructorWaitS = 2.0;
// Unit: threads. The maximum of `copy_threads`. More threads would only contend for memory bandwidth.
constexpr int32_t kMostCopyThreads = 64;
// Unit: ops. The maximum of `queue_ops`. The limit keeps the memory of one (kind, priority) queue at some
// tens of MiB.
constexpr int32_t kMostQueueOps = 1 << 20;

EngineOptions checked(const EngineOptions& options) {
  const auto require = [](const char* name, int32_t value, int32_t most) {
    if (value >= 1 && value <= most) return;
    throw ConfigError(std::string(name) + "=" + std::to_string(value) + ": must be in [1, " +
                      std::to_string(most) + "]");
  };
  require("queue_ops", options.queue_ops, kMostQueueOps);
  require("copy_threads", options.copy_threads, kMostCopyThreads);
  return options;
}

// Marks all lanes as belonging to this transfer engine. If one of them already belongs to a transfer engine,
// throws ContractError and marks none.
void claim_all(const std::vector<std::shared_ptr<Lane>>& lanes) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (lanes[i]->claim()) continue;
    for (size_t j = 0; j < i; ++j) lanes[j]->unclaim();
    throw ContractError(std::string("lane ") + lanes[i]->name() + " (number " + std::to_string(i) +
                        " of those given) belongs to a transfer engine already: a lane serves one engine");
  }
}

// Throws ContractError if a lane with streams gets no stream, or a lane without streams gets one.
void check_stream(const std::string& who, const Lane& lane, const std::optional<StreamId>& stream) {
  if (lane.needs_stream() == stream.has_value()) return;
  throw ContractError(who + ": lane " + lane.name() +
                      (stream ? " has no streams, but one was given"
                              : " copies after the engine's stream, and none was given"));
}

}  // namespace

TransferEngine::TransferEngine(std::shared_ptr<PageMover> mover, const EngineOptions& options,
                               std::vector<std::shared_ptr<Lane>> lanes)
    : scheduler_(std::make_shared<Scheduler>(checked(options).queue_ops, options.op_stuck_s)),
      op_stuck_s_(options.op_stuck_s),
      home_(getpid()) {
  // A lane with streams replaces the lane for host copies, because the inference engine's pool is either on
  // a device or in ordinary memory.
  const bool on_device =
      std::any_of(lanes.begin(), lanes.end(), [](const auto& lane) { return lane->needs_stream(); });
  if (!on_device) lanes_.push_back(std::make_shared<HostLane>(std::move(mover), options.copy_threads));
  lanes_.insert(lanes_.end(), lanes.begin(), lanes.end());
  for (const auto& lane : lanes_) {
    scheduler_->add_lane(lane);
    kinds_ |= lane->kinds();
  }
  started_.resize(lanes_.size());
  claim_all(lanes);
}

TransferEngine::~TransferEngine() {
  if (forked()) {
    // Leaks these objects. Joining threads that this process does not have, or destroying the condition
    // variables on which they sleep, would block forever.
    new std::shared_ptr<Scheduler>(scheduler_);
    new std::vector<std::shared_ptr<Lane>>(lanes_);
    new std::thread(std::move(watchdog_));
    new std::thread(std::move(slot_watch_));
    return;
  }
  if (close(kDestructorWaitS)) return;
  for (const auto& lane : lanes_) lane->abandon();
  // Does not block: neither the watchdog nor the slot watch waits for a lane.
  if (watchdog_.joinable()) watchdog_.join();
  if (slot_watch_.joinable()) slot_watch_.join();
}

void TransferEngine::attach_view(int32_t group, std::shared_ptr<const KvView> view,
                                 std::shared_ptr<HostPool> pool, int64_t stripe_offset,
                                 int64_t digest_offset) {
  require_home("attach_view");
  if (pool->closed())
    throw ClosedError("attach_view: the host pool of group " + std::to_string(group) + " was closed");
  auto attached = std::make_shared<const AttachedView>(group, std::move(view), std::move(pool), stripe_offset,
                                                       digest_offset);
  const std::lock_guard lock(views_mutex_);
  if (scheduler_->closing()) throw ClosedError("attach_view: the transfer engine was closed");
  if (views_.count(group) != 0) {
    throw ContractError("group " + std::to_string(group) + " has a view already: detach it first");
  }
  for (const auto& [number, other] : views_) {
    try {
      check_same_blocks_only(attached->view(), other->view());
    } catch (const GeometryError& error) {
      throw GeometryError("groups " + std::to_string(group) + " and " + std::to_string(number) + ": " +
                          error.what());
    }
  }
  views_.emplace(group, std::move(attached));
}

int64_t TransferEngine::detach_view(int32_t group) {
  require_home("detach_view");
  const std::lock_guard lock(views_mutex_);
  const auto found = views_.find(group);
  if (found == views_.end()) throw ContractError("group " + std::to_string(group) + " has no view");
  detached_.emplace(next_detached_, found->second);
  views_.erase(found);
  return next_detached_++;
}

std::vector<int64_t> TransferEngine::released_views() {
  std::vector<int64_t> released;
  if (forked()) return released;
  const std::lock_guard lock(views_mutex_);
  for (auto at = detached_.begin(); at != detached_.end();) {
    if (!at->second.expired()) {
      ++at;
      continue;
    }
    released.push_back(at->first);
    at = detached_.erase(at);
  }
  return released;
}

bool TransferEngine::has_results() const {
  require_home("poll");
  return scheduler_->has_results();
}

std::vector<OpResult> TransferEngine::poll(size_t max_results) {
  require_home("poll");
  return scheduler_->poll(max_results);
}

bool TransferEngine::wait(int64_t ticket, double deadline_s) {
  require_home("wait");
  return scheduler_->wait(ticket, deadline_s);
}

LayerWait TransferEngine::wait_layer(int64_t ticket, int32_t layer, double deadline_s) {
  require_home("wait_layer");
  return scheduler_->wait_layer(ticket, layer, deadline_s);
}

LayerWait TransferEngine::wait_layer_on(int64_t ticket, int32_t layer, double deadline_s, StreamId stream) {
  require_home("wait_layer");
  const bool has_streams =
      std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->needs_stream(); });
  if (!has_streams) throw ContractError("wait_layer: this engine's lanes have no streams, but one was given");
  const auto deadline = deadline_in(deadline_s);
  LayerWait answer = scheduler_->wait_layer(ticket, layer, deadline_s, true);
  if (!answer.in_time || !answer.failed.empty()) return answer;
  for (const auto& [kind, event] : answer.events) {
    if (lane_of(kind)->make_wait(*event, stream).empty()) continue;
    // The stream could not be made to wait, so this thread waits until the layer is in place.
    return scheduler_->wait_layer(ticket, layer, seconds_until(deadline));
  }
  return answer;
}

TransferEngine::Ordered TransferEngine::order_after(int64_t ticket, double deadline_s,
                                                    std::optional<StreamId> stream) {
  require_home("order_after");
  Lane* lane = lane_of(OpKind::kD2H);
  if (lane == nullptr) throw ContractError("order_after: this engine has no lane for D2H");
  check_stream("order_after", *lane, stream);
  const auto [in_time, behind_forward, events] =
      scheduler_->enqueue_all(ticket, deadline_s, stream.has_value());
  for (size_t i = 0; in_time && i < events.size(); ++i) {
    const auto& [kind, event] = events[i];
    if (std::string error = lane_of(kind)->make_wait(*event, *stream); !error.empty()) {
      throw CapacityError(error);
    }
  }
  return {in_time, behind_forward};
}

std::shared_ptr<StreamEvent> TransferEngine::record(StreamId stream) {
  require_home("record");
  for (const auto& lane : lanes_) {
    if (lane->needs_stream()) return lane->record(stream);
  }
  throw ContractError("record: this engine's lanes have no streams");
}

void TransferEngine::open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                                 std::optional<StreamId> stream) {
  require_home("open_layers");
  Lane* lane = lane_of(OpKind::kD2H);
  if (lane == nullptr) throw ContractError("open_layers: this engine has no lane for D2H");
  check_stream("open_layers", *lane, stream);
  scheduler_->open_layers(tickets, layers, stream ? lane->record(*stream) : nullptr);
}

int64_t TransferEngine::cancel(int64_t ticket) {
  require_home("cancel");
  return scheduler_->cancel(ticket);
}

std::vector<LaneState> TransferEngine::lanes() const {
  require_home("lanes");
  return scheduler_->lanes();
}

void TransferEngine::start_lanes(const GraphSpec& graph) {
  KindSet used = 0;
  for (const OpSpec& op : graph.ops) used |= kind_bit(op.kind);
  const std::lock_guard lock(lifecycle_);
  if (ended_) throw ClosedError("submit: the transfer engine was closed");
  try {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (started_[i] || (lanes_[i]->kinds() & used) == 0) continue;
      lanes_[i]->start(scheduler_, static_cast<int32_t>(i));
      started_[i] = true;
    }
    if (op_stuck_s_ > 0 && !watchdog_.joinable()) {
      watchdog_ = std::thread([scheduler = scheduler_] { scheduler->watch(); });
      pthread_setname_np(watchdog_.native_handle(), "flexkv-watch");
    }
    const bool awaits =
        std::any_of(graph.ops.begin(), graph.ops.end(), [](const OpSpec& op) { return !op.reads.empty(); });
    if (awaits && !slot_watch_.joinable()) {
      slot_watch_ = std::thread([scheduler = scheduler_] { scheduler->watch_slots(); });
      pthread_setname_np(slot_watch_.native_handle(), "flexkv-slots");
    }
  } catch (const std::system_error& error) {
    throw CapacityError(std::string("submit: no thread for a lane: ") + error.what());
  }
}

bool TransferEngine::forked() const { return getpid() != home_; }

// Throws ClosedError in a forked child. Calls cannot work there, because the engine's threads, which do not
// exist in the child, may have held the engine's locks during the fork.
void TransferEngine::require_home(const char* what) const {
  if (forked())
    throw ClosedError(std::string(what) + ": the engine stayed in process " + std::to_string(home_));
}

Lane* TransferEngine::lane_of(OpKind kind) const {
  for (const auto& lane : lanes_) {
    if ((lane->kinds() & kind_bit(kind)) != 0) return lane.get();
  }
  return nullptr;
}

// Records the graph's fence before any lane can take its pages. A transfer engine has one device, so any lane
// with streams can record the fence for all of them.
void TransferEngine::make_fence(GraphSpec& graph, std::optional<StreamId> stream) const {
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    Lane* lane = lane_of(graph.ops[i].kind);
    if (lane == nullptr || !has_device_side(graph.ops[i].kind)) continue;
    check_stream(name_of(graph.ops[i], i), *lane, stream);
    // The fences of a gated graph are recorded by open_layers(), because the work that writes the graph's
    // layers is not enqueued yet.
    if (stream && graph.fence == nullptr && !graph.gated) graph.fence = lane->record(*stream);
  }
}

std::optional<int64_t> TransferEngine::submit(GraphSpec graph, std::optional<StreamId> stream) {
  require_home("submit");
  std::vector<std::shared_ptr<const AttachedView>> views;
  views.reserve(graph.ops.size());
  {
    const std::lock_guard lock(views_mutex_);
    for (const OpSpec& op : graph.ops) {
      const auto found = views_.find(op.group);
      const bool has_view = found != views_.end() && has_device_side(op.kind);
      views.push_back(has_view ? found->second : nullptr);
    }
  }
  if (scheduler_->closing()) throw ClosedError("submit: the transfer engine was closed");
  std::vector<PageSizes> sizes;
  sizes.reserve(graph.ops.size());
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const OpSpec& op = graph.ops[i];
    sizes.push_back(check_op(op, i, views[i].get(), lane_of(op.kind), kinds_));
  }
  check_edges(graph);
  check_gate(graph);
  start_lanes(graph);
  make_fence(graph, stream);
  return scheduler_->submit(std::move(graph), views, sizes);
}

bool TransferEngine::close(double deadline_s) {
  if (forked()) return true;
  const auto deadline = deadline_in(deadline_s);
  scheduler_->begin_close();
  if (!scheduler_->wait_quiet(seconds_until(deadline))) return false;
  const std::lock_guard lock(lifecycle_);
  ended_ = true;
  for (const auto& lane : lanes_) lane->join();
  if (watchdog_.joinable()) watchdog_.join();
  if (slot_watch_.joinable()) slot_watch_.join();
  const std::lock_guard views_lock(views_mutex_);
  views_.clear();
  return true;
}

}  // namespace flexkv
