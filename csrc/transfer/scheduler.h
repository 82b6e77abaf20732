// Decides which page may move next, and records how each op ended. One lock guards all of this state; no byte
// moves while it is held.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "transfer/lane.h"
#include "transfer/op_state.h"

namespace flexkv {

// Unit: items. When this many items of loads in a row have overtaken a waiting store, one item of the store
// runs: under endless loads, stores still get 1/17 of the lane, which costs a load at most 6 %.
inline constexpr int32_t kPiecesBeforeAged = 16;
// Unit: graphs. How many ended and polled graphs wait_layer() still knows.
inline constexpr size_t kRememberedGraphs = 256;

// Unit: checks. The watchdog checks this many times per `op_stuck_s`; a work item that made no progress in
// that many checks is stuck. It counts checks, not seconds, because a process that was stopped (SIGSTOP, a
// frozen container, a suspended machine) resumes with all its copies late but none of them hung.
inline constexpr int32_t kLooksUntilStuck = 4;

// Unit: seconds. The pause between two checks of whether another transfer engine's reads have filled the
// slots that loads wait for. A check costs one memory access per page, 10 us for 10,000 pages; during the
// pause a disk reads 1.5 MB, a fraction of what a lane takes at once. Notifications would instead cost each
// disk one system call per page.
inline constexpr double kSlotLookS = 0.0005;

struct LayerWait {
  bool in_time = false;  // false: the deadline passed, and the ops go on
  // (op id, positions) of each op with failed pages.
  std::vector<std::pair<int64_t, std::vector<int32_t>>> failed;
  // With `issued`: the layer is in place after all of these events. Each has the kind of its op.
  std::vector<std::pair<OpKind, std::shared_ptr<StreamEvent>>> events = {};
};

struct LaneState {
  OpKind kind = OpKind::kH2D;
  std::string lane;
  bool up = true;
  std::string reason;          // why it is down
  int64_t open_ops = 0;        // ops that have not ended
  int64_t held_places = 0;     // queue entries of ops that have not ended, or have ended but were not polled
  std::vector<int64_t> stuck;  // ids of ops whose bytes may still move although the lane is down
  int64_t times_down = 0;      // since the engine was made; a lane comes up again once no item is stuck
};

class Scheduler : public WorkSource {
 public:
  // `queue_ops` queue entries for each (kind, priority). `op_stuck_s` <= 0: no item ever counts as stuck.
  Scheduler(int32_t queue_ops, double op_stuck_s);
  ~Scheduler() override;

  // Adds a lane; its number is the count of lanes added before. Call before the first submit.
  void add_lane(std::shared_ptr<Lane> lane);
  KindSet kinds() const;

  // Takes a graph that the engine has checked. `views[i]` is the view of op i; if it is null, `sizes[i]`
  // gives the size of a page of the op. Returns a ticket, or nothing if too few queue entries are free.
  // Throws ClosedError, or ContractError if an op id is in flight already.
  std::optional<int64_t> submit(GraphSpec graph,
                                const std::vector<std::shared_ptr<const AttachedView>>& views,
                                const std::vector<PageSizes>& sizes);
  std::vector<OpResult> poll(size_t max_results);
  // Whether poll() would return any result. Does not wait for a lock.
  bool has_results() const { return has_results_; }
  // Both throw ContractError for a ticket that was never returned; wait_layer() also for one that was
  // forgotten.
  bool wait(int64_t ticket, double deadline_s);
  // `issued`: the layer need not be in place; it is enough that its copies are enqueued, with an event behind
  // them.
  LayerWait wait_layer(int64_t ticket, int32_t layer, double deadline_s, bool issued = false);
  struct Enqueued {
    bool in_time = false;  // false: the deadline passed, and the ops go on
    // Whether a store to disk, which cannot be enqueued, waits behind work that the engine still runs. Always
    // false with a deadline of 0; may be true even if in time.
    bool behind_forward = false;
    // After all of these events no byte of the engine's blocks is read any more. Each has the kind of its op.
    std::vector<std::pair<OpKind, std::shared_ptr<StreamEvent>>> events = {};
  };
  // Waits until the graph's stores have read the engine's blocks or, with `on_streams`, until the lanes'
  // threads have enqueued those reads, which they do at once. A store to disk cannot be enqueued; if one
  // waits behind a forward pass that still runs, this returns without waiting for it. Throws ContractError
  // for a ticket that was never returned.
  Enqueued enqueue_all(int64_t ticket, double deadline_s, bool on_streams);
  // Lets these gated graphs copy layers [0, layers), after `fence` if there is one. Ignores graphs that have
  // ended and layers that are open already. Opens nothing, and throws, if a graph has fewer layers
  // (BlockRangeError) or a ticket was never returned (ContractError).
  void open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                   const std::shared_ptr<StreamEvent>& fence);
  // Cancels the pages that no lane has taken. Returns how many there were.
  int64_t cancel(int64_t ticket);

  // Readable if and only if results wait to be polled.
  int event_fd() const { return event_fd_; }
  std::vector<LaneState> lanes() const;

  // Refuses submits, cancels queued pages, makes the lanes' take() return null. Idempotent.
  void begin_close();
  // Waits until no item is under way; returns false if the deadline passes first.
  bool wait_quiet(double deadline_s);
  bool closing() const;

  // Runs until close, on the watchdog thread: takes down lanes whose items have made no progress for
  // `op_stuck_s`. Sleeps while nothing moves.
  void watch();

  // Runs until close, on a separate thread: starts pages whose slots another transfer engine's reads have
  // filled, and ends those whose read failed. Sleeps while no load waits for slots.
  void watch_slots();

  std::shared_ptr<WorkItem> take(int32_t lane) override;
  std::shared_ptr<WorkItem> try_take(int32_t lane, KindSet allowed) override;
  std::shared_ptr<WorkItem> try_take_expedited(int32_t lane) override;
  bool extend(const std::shared_ptr<WorkItem>& item) override;
  void issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
              std::span<const std::shared_ptr<StreamEvent>> events) override;
  void passed(const std::shared_ptr<WorkItem>& item, int32_t stage) override;
  void finish(const std::shared_ptr<WorkItem>& item, const std::vector<MoveResult>& results) override;
  void finish_pages(const std::shared_ptr<WorkItem>& item, const std::vector<size_t>& indices,
                    const std::vector<MoveResult>& results) override;

 private:
  struct Graph {
    std::vector<std::shared_ptr<OpState>> ops;
    size_t open = 0;
    size_t unpolled = 0;
  };
  struct KindQueue {
    int32_t lane = -1;
    std::array<std::map<uint64_t, OpState*>, kPriorities> runnable;  // ops with a ready page, by age
    std::array<int32_t, kPriorities> places{};
    std::map<uint64_t, OpState*> open;  // not ended
    bool up = true;
    std::string down_reason;
    int64_t times_down = 0;
  };
  // The effect of an ended op or page on those that wait for it. Kept in a list rather than on the stack,
  // because a chain of ops may be as long as the queues.
  struct Consequence {
    enum class Kind { kStart, kEndOp, kEndPage } kind;
    OpState* op;
    int32_t page = -1;
    std::string reason = {};
  };
  // Pages whose slots another transfer engine's reads have not filled completely.
  struct Coming {
    std::shared_ptr<OpState> op;
    std::vector<int32_t> pages;
  };
  struct LaneEntry {
    std::shared_ptr<Lane> lane;
    std::condition_variable work;
    int32_t idle = 0;   // threads asleep in take()
    int32_t woken = 0;  // how many of these have been notified but have not run yet
    // One per kind if the lane's kinds are apart, else only the first is used.
    std::array<int32_t, kOpKinds> urgent_streaks{};
  };

  KindQueue& queue_of(const OpState& op) { return queues_[static_cast<size_t>(op.spec().kind)]; }
  Lane& lane_of(const OpState& op) { return *lanes_[static_cast<size_t>(queue_of(op).lane)]->lane; }
  // Wakes the lane on behalf of the op's items under way, which have no ready page that would wake it.
  void wake_lane_of_moving(OpState& op) {
    if (op.moving_pages() > 0) lane_of(op).wake(op.spec().kind);
  }
  // Keeps an ended graph for wait_layer(), and moves the oldest one kept to `forgotten` when there are too
  // many. The caller destroys `forgotten` without the lock: dropping the last reference to an event calls the
  // driver.
  void remember(int64_t ticket, std::vector<Graph>& forgotten);
  std::vector<std::shared_ptr<StreamEvent>> fences_before(const OpState& op) const;
  void require_given(int64_t ticket, const char* what) const;
  bool places_free(const GraphSpec& graph) const;
  void start_if_free(OpState& op);
  bool make_ready(OpState& op, int32_t page);
  void update_runnable(OpState& op);
  void end_page(OpState& op, int32_t page, PageState end, const std::string& reason,
                FailureCause cause = FailureCause::kUnknown);
  void end_all_pages(OpState& op, PageState end, const std::string& reason);
  void page_arrived(OpState& op, int32_t page);
  void tell_read_ended(OpState& op, int32_t page, bool verified);
  void tell_layers_read(OpState& op, int32_t page);
  void settle(OpState& op);
  void carry_on();
  OpState* pick(LaneEntry& entry, KindSet allowed);
  std::shared_ptr<WorkItem> take_locked(int32_t lane, KindSet allowed);
  std::shared_ptr<WorkItem> take_of(OpState& chosen, int32_t lane);
  void take_down(OpKind kind, const std::string& reason);
  void look_for_stuck();
  void look_for_arrivals();
  bool look_for_arrivals(Coming& coming);
  void revive();

  const int32_t queue_ops_;
  const double op_stuck_s_;
  const int event_fd_;
  mutable std::mutex mutex_;
  std::condition_variable progress_;  // an op ended, a layer was done, a work item was finished
  std::condition_variable watchdog_;  // a first work item is under way, or closing
  std::condition_variable arrivals_;  // a first load waits for slots, or closing
  std::vector<std::unique_ptr<LaneEntry>> lanes_;
  std::array<KindQueue, kOpKinds> queues_;
  std::map<int64_t, Graph> graphs_;
  std::deque<int64_t> remembered_;  // tickets of graphs ended and polled, oldest first
  std::unordered_set<int64_t> op_ids_;
  std::deque<std::pair<OpResult, std::shared_ptr<OpState>>> results_;
  std::atomic<bool> has_results_{false};  // changes with results_, before event_fd_ does
  std::set<std::shared_ptr<WorkItem>> moving_;
  std::deque<Consequence> consequences_;  // empty whenever the lock is free
  std::list<Coming> coming_;
  std::vector<std::shared_ptr<OpState>> expedited_;  // not ended
  int64_t next_ticket_ = 1;
  uint64_t next_sequence_ = 1;
  bool watchdog_idle_ = false;
  bool closing_ = false;
};

}  // namespace flexkv
