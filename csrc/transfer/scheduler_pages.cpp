// The part of the scheduler that decides what happens after a page or an op has finished: which pages may
// start, which pages are skipped, and which ops are finished.
#include <unistd.h>

#include <utility>

#include "base/error.h"
#include "transfer/scheduler.h"

namespace flexkv {

void Scheduler::start_if_free(OpState& op) {
  if (op.waiting_barriers > 0 || op.ended) return;
  for (int32_t page = 0; page < op.pages(); ++page) {
    make_ready(op, page);
  }
  update_runnable(op);
  settle(op);  // an op without pages finishes at once
}

// Makes a waiting page ready if it does not have to wait for a barrier, a stream edge or a read. Returns
// whether it has become ready.
bool Scheduler::make_ready(OpState& op, int32_t page) {
  if (op.state(page) != PageState::kWaiting || op.waiting_barriers > 0) return false;
  if (!op.waiting_streams.empty() && op.waiting_streams[static_cast<size_t>(page)] > 0) return false;
  if (!op.has_arrived(page)) return false;
  op.make_ready(page);
  return true;
}

// If the op has ready pages, adds it to `runnable` and wakes its lane. Otherwise removes it from `runnable`.
void Scheduler::update_runnable(OpState& op) {
  KindQueue& queue = queue_of(op);
  auto& runnable = queue.runnable[static_cast<size_t>(op.effective_priority)];
  if (!op.has_ready()) {
    runnable.erase(op.sequence());
    return;
  }
  LaneEntry& entry = *lanes_[static_cast<size_t>(queue.lane)];
  if (runnable.emplace(op.sequence(), &op).second) entry.lane->wake(op.spec().kind);
  if (entry.idle > entry.woken) {
    ++entry.woken;
    entry.work.notify_one();
  }
}

void Scheduler::end_page(OpState& op, int32_t page, PageState end, const std::string& reason,
                         FailureCause cause) {
  op.fail(page, end, reason, cause);
  tell_read_ended(op, page, false);
  update_runnable(op);
  progress_.notify_all();  // a failed page may be the last one that wait_layer() waited for
  for (const auto& [after, kind] : op.successors) {
    if (kind != EdgeKind::kStream || after->state(page) != PageState::kWaiting) continue;
    // A page that is skipped because an earlier op's page was skipped gets that page's reason unchanged.
    // Otherwise the reason would grow with every op of a chain of ops.
    const std::string why = end == PageState::kSkipped
                                ? reason
                                : "page " + std::to_string(page) + " of op " +
                                      std::to_string(op.spec().op_id) + ", which it waits for: " + reason;
    consequences_.push_back({Consequence::Kind::kEndPage, after, page, why});
  }
}

// Calls the lane's read_ended() for a page of a kDiskRead op, because loads of other transfer engines may be
// waiting for the page.
void Scheduler::tell_read_ended(OpState& op, int32_t page, bool verified) {
  if (op.spec().kind != OpKind::kDiskRead) return;
  lanes_[static_cast<size_t>(queue_of(op).lane)]->lane->read_ended(op.spec(), page, verified);
}

// Calls the lane's read_advanced() with the number of a page's layers that have been read, because layerwise
// loads of other transfer engines may be waiting for these layers.
void Scheduler::tell_layers_read(OpState& op, int32_t page) {
  if (op.spec().kind != OpKind::kDiskRead) return;
  const int32_t layers = op.layers_done(page);
  lanes_[static_cast<size_t>(queue_of(op).lane)]->lane->read_advanced(op.spec(), page, layers);
}

// Handles the consequences of finished ops and pages until none is left. Every call that may finish an op or
// a page calls this before it releases the lock.
void Scheduler::carry_on() {
  while (!consequences_.empty()) {
    const Consequence next = std::move(consequences_.front());
    consequences_.pop_front();
    OpState& op = *next.op;
    switch (next.kind) {
      case Consequence::Kind::kStart:
        --op.waiting_barriers;
        start_if_free(op);
        break;
      case Consequence::Kind::kEndOp:
        end_all_pages(op, PageState::kSkipped, next.reason);
        break;
      case Consequence::Kind::kEndPage:
        if (op.state(next.page) == PageState::kWaiting) {
          end_page(op, next.page, PageState::kSkipped, next.reason);
          settle(op);
        }
        break;
    }
  }
}

// Ends all pages of an op except those that a lane has taken. Pages in flight end when their work item
// finishes.
void Scheduler::end_all_pages(OpState& op, PageState end, const std::string& reason) {
  if (op.ended) return;
  if (op.pages() == 0) op.fail_empty(end, reason);
  // The loop runs from the last page to the first, because PageProgress::end_page() searches the ready pages
  // in that order.
  for (int32_t page = op.pages() - 1; page >= 0; --page) {
    const PageState state = op.state(page);
    if (state == PageState::kWaiting || state == PageState::kReady) end_page(op, page, end, reason);
  }
  op.waiting_barriers = 0;
  settle(op);
}

// Called when a page has finished OK. Starts pages of other ops that waited only for this page.
void Scheduler::page_arrived(OpState& op, int32_t page) {
  tell_read_ended(op, page, true);
  for (const auto& [after, kind] : op.successors) {
    if (kind != EdgeKind::kStream) continue;
    --after->waiting_streams[static_cast<size_t>(page)];
    if (make_ready(*after, page)) update_runnable(*after);
  }
}

// Finishes the op if all its pages have finished and it does not have to wait for a barrier edge. Then queues
// the consequences for the ops that wait for this op because of a barrier edge.
void Scheduler::settle(OpState& op) {
  if (op.ended || !op.all_settled() || op.waiting_barriers > 0) return;
  op.ended = true;
  OpResult result = op.result();
  const bool ok = result.status == Status::kOk;
  const std::string why = result.status == Status::kSkipped ? result.reason
                                                            : "op " + std::to_string(op.spec().op_id) +
                                                                  ", which it waits for: " + result.reason;
  KindQueue& queue = queue_of(op);
  queue.open.erase(op.sequence());
  op.release_view();
  if (op.expedited()) std::erase_if(expedited_, [&](const auto& one) { return one.get() == &op; });
  --graphs_.at(op.ticket()).open;
  results_.emplace_back(std::move(result), op.shared_from_this());
  has_results_ = true;
  if (results_.size() == 1) {
    const uint64_t one = 1;
    // The counter was 0 before, so the write can neither block nor fail.
    if (write(event_fd_, &one, sizeof(one)) != sizeof(one)) throw ContractError("eventfd write");
  }
  progress_.notify_all();
  for (const auto& [after, kind] : op.successors) {
    if (kind != EdgeKind::kBarrier || after->ended) continue;
    consequences_.push_back(
        {ok ? Consequence::Kind::kStart : Consequence::Kind::kEndOp, after, -1, ok ? std::string() : why});
  }
}

}  // namespace flexkv
