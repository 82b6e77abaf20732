#include "cuda/lane_direction.h"

#include <sys/prctl.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/nvtx.h"

namespace flexkv::cuda {
namespace {

// Unit: seconds per byte. The minimum and the maximum of the pace (time per byte) that the thread assumes for
// copies. Before the first measurement, the thread assumes kFastestPace.
constexpr double kFastestPace = 1 / 60e9;
constexpr double kSlowestPace = 1 / 10e9;
// No unit. A portion counts as due when this share of the time that its copy should take has passed.
constexpr double kRestShare = 0.96;
// Unit: seconds. The thread wakes up this long before a portion is due, because the thread may sleep longer
// than requested.
constexpr double kEarlyS = 40e-6;
// Unit: seconds. For this long after a portion was due, the thread polls for its end without a pause.
constexpr double kPollS = 2e-3;
// Unit: seconds. The pauses between polls for a portion that is late by more than kPollS, or that waits for
// the inference engine's work. The long pause applies if the portion is late by 10 * kPollS or more.
constexpr double kShortPauseS = 50e-6;
constexpr double kLongPauseS = 200e-6;
// Unit: items. While this many layerwise items wait to be enqueued, the thread takes no further items.
// Portions of these items are enqueued in turn, so that the first layers of all of them are copied soon.
constexpr size_t kItemsByLayer = 8;
// Unit: bytes. Between two polls for copies in flight, the thread computes digests of pages that were stored,
// for at most this many bytes.
constexpr int64_t kDigestBytes = 2 << 20;

}  // namespace

LaneDirection::LaneDirection(Direction direction, std::shared_ptr<Device> device,
                             std::shared_ptr<Copier> copier, std::shared_ptr<DigestCrew> digests)
    : direction_(direction),
      kind_(direction == Direction::kToDevice ? OpKind::kH2D : OpKind::kD2H),
      device_(std::move(device)),
      copier_(std::move(copier)),
      digests_(std::move(digests)) {
  queues_[0].stream = std::make_unique<CopyStream>(device_, false);
  if (direction == Direction::kToDevice) queues_[1].stream = std::make_unique<CopyStream>(device_, true);
}

void LaneDirection::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_one();
}

void LaneDirection::end() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  changed_.notify_one();
}

void LaneDirection::run(WorkSource& source, int32_t lane) {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // in ns; the default of 50 us would be half of a portion's time
  const QuietCurrent here(*device_);
  refused_ = here.error();
  for (;;) {
    look_at_items(source, lane);
    const bool moved = end_portions(source);
    if (enqueue_expedited(source) || enqueue_in_turn(source) || make_digests(source) || moved) continue;
    if (!rest(source)) return;
  }
}

LaneDirection::Queue& LaneDirection::queue_of(const ItemMove& move) const {
  return queues_[direction_ == Direction::kToDevice && move.item()->layerwise() ? 1 : 0];
}

// Whether the queue's stream may take one more portion of an item that is not expedited.
bool LaneDirection::has_room(const Queue& queue) const {
  if (queue.in_flight.empty()) return true;
  const bool by_kernel = queue.in_flight.back().by_kernel;
  return queue.in_flight.size() <
         (by_kernel ? kLaunchesInFlight : kPortionsInFlight[static_cast<size_t>(direction_)]);
}

// Takes work items until enough of them wait to be enqueued. Also adds stages that have become ready to items
// in flight, and stops cancelled items.
void LaneDirection::look_at_items(WorkSource& source, int32_t lane) {
  if (woken_.exchange(false)) {
    may_take_ = true;
    stop_cancelled(source);
    for (const auto& move : moves_) {
      if (move->may_grow()) source.extend(move->item());
    }
    while (direction_ == Direction::kToHost) {
      std::shared_ptr<WorkItem> item = source.try_take_expedited(lane);
      if (!item) break;
      begin_move(std::move(item));
    }
  }
  while (may_take_ && take_one(source, lane)) continue;
}

bool LaneDirection::take_one(WorkSource& source, int32_t lane) {
  size_t waiting = 0;
  for (const auto& move : moves_) {
    if (!move->may_enqueue() || move->item()->expedited()) continue;
    if (!move->item()->layerwise() || ++waiting >= kItemsByLayer) return false;
  }
  std::shared_ptr<WorkItem> item = source.try_take(lane, kind_bit(kind_));
  may_take_ = item != nullptr;
  if (item) begin_move(std::move(item));
  return may_take_;
}

void LaneDirection::begin_move(std::shared_ptr<WorkItem> item) {
  moves_.push_back(std::make_shared<ItemMove>(std::move(item), direction_, copier_->capabilities()));
}

void LaneDirection::stop_cancelled(WorkSource& source) {
  for (auto at = moves_.begin(); at != moves_.end();) {
    const std::shared_ptr<ItemMove> move = *at++;  // a copy, because the item may be removed from the list
    if (!move->item()->cancelled() || move->stopped()) continue;
    Queue& queue = queue_of(*move);
    move->stop({Status::kCancelled, "cancelled", {}, FailureCause::kNotExecuted});
    // Kernels are stopped only if they store pages: a forward pass may wait for the copies of a load.
    if (direction_ == Direction::kToHost) {
      for (Portion& portion : queue.in_flight) {
        if (portion.move != move || !portion.by_kernel || !move->item()->unwanted()) continue;
        portion.stopped = queue.stream->stop(portion.mark).empty();
      }
      // With this call, the inference engine's stream waits only for the portions in flight, not for the end
      // of the op.
      say_issued(source, *move, move->item()->stages() - 1);
    }
    finish_pages(source, *move);
  }
}

// Reports that the stages up to `stage` are enqueued. If there is no memory for an event, nothing is
// reported, and callers wait for the end of the op instead.
void LaneDirection::say_issued(WorkSource& source, const ItemMove& move, int32_t stage) {
  std::shared_ptr<StreamEvent> event;
  try {
    event = std::make_shared<Event>(device_, queue_of(move).stream->handle());
  } catch (const CapacityError&) {
    return;
  }
  source.issued(move.item(), stage, std::span(&event, 1));
}

bool LaneDirection::end_portions(WorkSource& source) {
  bool any = false;
  for (Queue& queue : queues_) {
    while (!queue.in_flight.empty() && queue.stream->reached(queue.in_flight.front().mark)) {
      end_portion(source, queue, {});
      any = true;
    }
  }
  return any;
}

void LaneDirection::end_portion(WorkSource& source, Queue& queue, const std::string& error) {
  const Portion portion = std::move(queue.in_flight.front());
  queue.in_flight.pop_front();
  learn_pace(queue, portion);
  if (!queue.in_flight.empty()) set_due(queue);
  Part& part = *portion.part;
  portion.move->item()->touch();
  if (!error.empty()) {
    part.bad = {Status::kFailed, error, {}, FailureCause::kTransport};
    part.enqueued = true;
    portion.move->stop(part.bad);
  } else if (portion.stopped) {
    queue.stream->forget_stop(portion.mark);
    part.bad = {Status::kCancelled, "cancelled", {}, FailureCause::kNotExecuted};
  }
  if (--part.portions > 0 || !part.enqueued) return;
  if (direction_ == Direction::kToHost && part.bad.status == Status::kOk && !part.indices.empty() &&
      portion.move->item()->page(part.indices.front()).view->has_digests()) {
    undigested_.push_back({portion.move, portion.part});
  } else {
    end_part(source, *portion.move, part);
  }
}

// Computes when the oldest portion is due. Precondition: the copy of that portion begins now, because the
// portion before it has ended, or because its own fence has just been reached.
void LaneDirection::set_due(Queue& queue) {
  Portion& next = queue.in_flight.front();
  const double pace = std::max(kFastestPace, queue.pace[next.by_kernel ? 1 : 0]);
  next.due = Clock::now() + to_duration(kRestShare * pace * static_cast<double>(next.bytes));
}

void LaneDirection::learn_pace(Queue& queue, const Portion& ended) {
  const auto now = Clock::now();
  const double took = std::chrono::duration<double>(now - std::exchange(queue.last_end, now)).count();
  // The start time of a portion is known only if the portion directly followed another portion.
  const bool followed = std::exchange(queue.went_on, !queue.in_flight.empty());
  if (ended.bytes <= 0 || !followed) return;
  double& pace = queue.pace[ended.by_kernel ? 1 : 0];
  const double seen = std::clamp(took / static_cast<double>(ended.bytes), kFastestPace, kSlowestPace);
  pace = seen < pace ? seen : pace + (seen - pace) / 8;
}

// Computes digests of pages that were stored, for at most kDigestBytes. Returns false if there was nothing to
// do.
bool LaneDirection::make_digests(WorkSource& source) {
  if (undigested_.empty()) return false;
  Undigested& next = undigested_.front();
  const WorkItem& item = *next.move->item();
  const AttachedView& view = *item.page(next.part->indices.front()).view;
  const int32_t lo = item.layers_of(next.part->first_stage).first;
  const int32_t hi = item.layers_of(next.part->last_stage).second;
  const auto count = static_cast<size_t>(
      std::max<int64_t>(1, kDigestBytes / std::max<int64_t>(1, view.layer_bytes(lo, hi))));
  std::vector<int32_t> slots;
  for (; next.done < next.part->indices.size() && slots.size() < count; ++next.done) {
    slots.push_back(item.page(next.part->indices[next.done]).slot);
  }
  digests_->write(view, slots, lo, hi);
  next.move->item()->touch();
  if (next.done < next.part->indices.size()) return true;
  const Undigested made = std::move(next);
  undigested_.pop_front();
  end_part(source, *made.move, *made.part);
  return true;
}

void LaneDirection::end_part(WorkSource& source, ItemMove& move, const Part& part) {
  move.end(part);
  const bool more = part.last_stage < move.item()->last_stage();
  if (part.last_of_stages && more && part.bad.status == Status::kOk && !move.stopped()) {
    source.passed(move.item(), part.last_stage);
  }
  finish_pages(source, move);
}

void LaneDirection::finish_pages(WorkSource& source, ItemMove& move) {
  const ItemMove::Ended ended = move.take_ended();
  if (ended.indices.empty()) return;
  source.finish_pages(move.item(), ended.indices, ended.results);
  if (move.ended()) std::erase_if(moves_, [&](const auto& one) { return one.get() == &move; });
}

// Enqueues one portion of an expedited op, for which the inference engine's stream waits. The number of
// portions in flight is not limited. Returns false if there is no such op.
bool LaneDirection::enqueue_expedited(WorkSource& source) {
  for (const auto& move : moves_) {
    if (!move->item()->expedited() || !move->may_enqueue()) continue;
    enqueue(source, std::shared_ptr<ItemMove>(move));
    return true;
  }
  return false;
}

// Enqueues one portion of an item. Prefers layerwise loads, and among them the load that is furthest behind,
// because each forward pass waits for its next layer. If there is no layerwise load, enqueues a portion of
// the oldest item. Returns false if nothing can be enqueued.
bool LaneDirection::enqueue_in_turn(WorkSource& source) {
  std::shared_ptr<ItemMove> chosen;
  for (const auto& move : moves_) {
    if (!move->may_enqueue() || !has_room(queue_of(*move))) continue;
    const bool by_layer = direction_ == Direction::kToDevice && move->item()->layerwise();
    const bool chosen_by_layer = chosen && direction_ == Direction::kToDevice && chosen->item()->layerwise();
    if (!chosen || (by_layer && (!chosen_by_layer || move->stage() < chosen->stage()))) chosen = move;
  }
  if (!chosen) return false;
  enqueue(source, chosen);
  return true;
}

// Returns the number of layerwise loads that take turns, but at least 1. Each of them gets an equal share of
// the size limit of a launch, so that the first layers of all these loads are copied soon.
int64_t LaneDirection::layerwise_moves() const {
  const auto count = std::count_if(moves_.begin(), moves_.end(), [](const auto& move) {
    return move->item()->layerwise() && move->may_enqueue();
  });
  return std::max<int64_t>(1, count);
}

void LaneDirection::enqueue(WorkSource& source, const std::shared_ptr<ItemMove>& move) {
  const nvtx::Range range(direction_ == Direction::kToDevice ? "flexkv H2D" : "flexkv D2H");
  std::shared_ptr<Part> part;
  try {
    part = move->part(*digests_, kLayersLaunchBytes / layerwise_moves());
  } catch (const std::exception& failure) {
    move->stop({Status::kFailed, failure.what(), {}, FailureCause::kTransport});
  }
  finish_pages(source, *move);  // finishes the pages that part() refused
  if (!part || move->ended() || !move->may_enqueue()) return;
  Queue& queue = queue_of(*move);
  Portion portion;
  portion.move = move;
  portion.part = part;
  portion.mark = queue.stream->next_mark();
  std::string error = refused_;
  if (error.empty()) {
    try {
      error = enqueue_next(*move->item(), *part, queue, portion);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    // A mark is made even after a failure: copies that were enqueued before the failure may be in flight, and
    // the pages must stay pinned until these copies have ended.
    if (std::string unmarked = queue.stream->mark(); error.empty()) error = std::move(unmarked);
  }
  ++part->portions;
  queue.in_flight.push_back(std::move(portion));
  if (queue.in_flight.size() == 1) set_due(queue);
  if (!error.empty()) {
    part->bad = {Status::kFailed, error, {}, FailureCause::kTransport};
    part->enqueued = true;
    move->stop(part->bad);
    if (!refused_.empty()) end_portion(source, queue, error);
    finish_pages(source, *move);
  } else if (part->runs.by_kernel.empty() && (!part->copies || part->copies->ended())) {
    part_is_enqueued(source, *move, *part);
  }
}

// Enqueues one portion of the part. If the kernel copies any of the part's runs, the first portion has all
// runs that the kernel copies, and later portions have the other runs. Returns an empty string on success,
// otherwise an error message.
std::string LaneDirection::enqueue_next(const WorkItem& item, Part& part, Queue& queue, Portion& portion) {
  // The stream first waits for the inference engine's stream. Forward passes that were enqueued earlier must
  // have written the bytes that a store reads, and must have read the bytes that a load overwrites.
  const auto& fence = item.fence_of(part.last_stage);
  if (fence && fence != queue.waited_for) {
    const auto stream = reinterpret_cast<StreamId>(queue.stream->handle());
    if (std::string error = fence->make_wait(stream); !error.empty()) return error;
    queue.waited_for = portion.fence = fence;
  }
  const std::vector<Segment> short_runs = std::exchange(part.runs.by_kernel, {});
  if (part.pages.empty()) return {};
  portion.by_kernel = !short_runs.empty() &&
                      copier_->launch(direction_, short_runs, part.pages, *queue.stream, part.stage_runs);
  if (portion.by_kernel && !part.stage_runs.empty()) {
    part.stage_points = stage_points(copier_, *queue.stream, static_cast<int32_t>(part.stage_runs.size()));
  }
  std::vector<Segment>& others = part.runs.by_engine;
  if (!portion.by_kernel) others.insert(others.end(), short_runs.begin(), short_runs.end());
  if (!part.copies && !others.empty()) {
    part.copies.emplace(others, part.pages, direction_ == Direction::kToHost ? kStoreCopyBytes : INT64_MAX);
  }
  if (portion.by_kernel) {
    for (const Segment& run : short_runs) portion.bytes += run.run_bytes;
    portion.bytes *= static_cast<int64_t>(part.pages.size());
    return {};
  }
  if (!part.copies) return {};
  portion.bytes = part.copies->next(kPortionBytes[static_cast<size_t>(direction_)], kPortionCopies, copies_);
  return copier_->copy(direction_, copies_, part.registered, *queue.stream);
}

void LaneDirection::part_is_enqueued(WorkSource& source, ItemMove& move, Part& part) {
  part.enqueued = true;
  move.part_is_enqueued();
  if (!part.stage_points.empty()) {
    source.issued(move.item(), part.last_stage, part.stage_points);
  } else if (part.last_of_stages) {
    say_issued(source, move, part.last_stage);
  }
  if (move.may_grow()) source.extend(move.item());
}

// If the stream is broken, ends all portions in flight on it.
void LaneDirection::end_failed(WorkSource& source, Queue& queue) {
  if (queue.in_flight.empty()) return;
  const std::string failure = queue.stream->failure();
  while (!failure.empty() && !queue.in_flight.empty()) {
    // Portions that ended before the failure count as successful.
    const bool ended = queue.stream->reached(queue.in_flight.front().mark);
    end_portion(source, queue, ended ? std::string() : failure);
  }
}

// Returns the time of the next poll for the end of the oldest portion. If the time is `now`, the caller polls
// again without a pause.
Clock::time_point LaneDirection::next_look(WorkSource& source, Queue& queue, Clock::time_point now) {
  Portion& oldest = queue.in_flight.front();
  const double late = std::chrono::duration<double>(now - oldest.due).count();
  const auto pause = to_duration(late < 10 * kPollS ? kShortPauseS : kLongPauseS);
  if (oldest.fence) {
    if (!oldest.fence->reached()) return now + pause;
    oldest.fence.reset();
    set_due(queue);
    return now;
  }
  if (late < -kEarlyS) return oldest.due - to_duration(kEarlyS);
  if (late < kPollS) return now;
  if (now - queue.last_query >= to_duration(kPollS)) {
    queue.last_query = now;
    end_failed(source, queue);
  }
  return now + pause;
}

// Sleeps until there may be something to do. Returns false when the thread should end.
bool LaneDirection::rest(WorkSource& source) {
  const auto now = Clock::now();
  auto look = Clock::time_point::max();
  for (Queue& queue : queues_) {
    if (!queue.in_flight.empty()) look = std::min(look, next_look(source, queue, now));
  }
  if (look <= now) {
    std::this_thread::yield();
    return true;
  }
  std::unique_lock lock(mutex_);
  if (look == Clock::time_point::max()) {
    changed_.wait(lock, [this] { return woken_ || ending_; });
    return woken_ || !ending_;
  }
  changed_.wait_until(lock, look, [this] { return woken_.load(); });
  return true;
}

}  // namespace flexkv::cuda
