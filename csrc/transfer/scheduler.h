// The scheduler of a transfer engine. It decides which page may move next, and records the result of each op.
// One lock guards all of its state; no thread copies pages while it holds the lock.
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

// Unit: work items. When this many consecutive work items of load ops have overtaken a waiting store op, one
// work item of the store op is taken. So store ops get 1/17 of a lane's work items even if load ops never
// stop, and they slow load ops down by 6 % at most.
inline constexpr int32_t kPiecesBeforeAged = 16;
// Unit: graphs. How many graphs the scheduler remembers after they have finished and their results were
// polled. wait_layer() still accepts these graphs.
inline constexpr size_t kRememberedGraphs = 256;

// Unit: checks. The watchdog checks this many times per `op_stuck_s`. A work item counts as stuck if it made
// no progress during this many checks. Checks are counted instead of seconds because a process may be stopped
// for a while (SIGSTOP, a frozen container, a suspended machine). When it resumes, all its copies are late,
// but none of them hangs.
inline constexpr int32_t kLooksUntilStuck = 4;

// Unit: seconds. Some load ops wait for slots that another transfer engine is filling from disk. This is the
// pause between two checks of these slots. A check costs one memory access per page, 10 us for 10,000 pages.
// During the pause, a disk reads 1.5 MB, a fraction of one work item. Notifications instead of checks would
// cost one system call per page that is read.
inline constexpr double kSlotLookS = 0.0005;

// The result of Scheduler::wait_layer().
struct LayerWait {
  bool in_time = false;  // false: the deadline passed; the ops go on
  // For each op with failed pages, its id and the positions of these pages.
  std::vector<std::pair<int64_t, std::vector<int32_t>>> failed;
  // Filled only if wait_layer() was called with `issued`. The layer is in place once all of these events are
  // reached. Each event comes with the kind of the op that it belongs to.
  std::vector<std::pair<OpKind, std::shared_ptr<StreamEvent>>> events = {};
};

// The state of a lane for one kind of op. A kind is taken down (its ops then fail at once) because of a stuck
// work item. It comes up again when no item of this kind is stuck any more and the lane can move other items.
struct LaneState {
  OpKind kind = OpKind::kH2D;
  std::string lane;  // name of the lane
  bool up = true;
  std::string reason;    // why the kind is down; empty if it is up
  int64_t open_ops = 0;  // number of ops without a result
  // Number of queue entries in use. An op has an entry until its result is polled.
  int64_t held_places = 0;
  // Ids of ops with stuck work items. Bytes of these ops may still be moving.
  std::vector<int64_t> stuck;
  int64_t times_down = 0;  // how often the kind was taken down since the transfer engine was made
};

class Scheduler : public WorkSource {
 public:
  // `queue_ops`: the number of queue entries for each (kind, priority). `op_stuck_s`: see EngineOptions.
  Scheduler(int32_t queue_ops, double op_stuck_s);
  ~Scheduler() override;

  // Adds a lane. Lanes are numbered from 0 in the order of these calls. Must be called before the first
  // submit(). Throws ContractError if an earlier lane already serves one of this lane's kinds.
  void add_lane(std::shared_ptr<Lane> lane);
  KindSet kinds() const;

  // Queues a graph that the transfer engine has checked. `views[i]`: the view of op i; null if the kind needs
  // none. `sizes[i]`: what Lane::check returned for op i. Returns a ticket, or nullopt if too few queue
  // entries are free. Throws ClosedError after begin_close(), and ContractError if an op id is already in use
  // or the graph could never fit in the queues.
  std::optional<int64_t> submit(GraphSpec graph,
                                const std::vector<std::shared_ptr<const AttachedView>>& views,
                                const std::vector<PageSizes>& sizes);
  // Returns up to `max_results` results of finished ops, and frees the ops' queue entries.
  std::vector<OpResult> poll(size_t max_results);
  // Whether poll() would return any result. Does not wait for a lock.
  bool has_results() const { return has_results_; }
  // Waits until all ops of the graph have finished. Returns false if the deadline passes first. Throws
  // ContractError if submit() never returned `ticket`.
  bool wait(int64_t ticket, double deadline_s);
  // Waits until a layer is in place in all pages that the graph loads. With `issued`, waits only until the
  // layer's copies are enqueued, and returns events that are reached after the copies. Throws ContractError
  // if submit() never returned `ticket` or its graph is no longer remembered, and BlockRangeError if there is
  // no such layer.
  LayerWait wait_layer(int64_t ticket, int32_t layer, double deadline_s, bool issued = false);
  struct Enqueued {
    bool in_time = false;  // false: the deadline passed; the ops go on
    // Whether an op that stores to disk waits behind work that the inference engine is still running. (The
    // reads of an op that stores to disk cannot be enqueued on a stream.) Always false with a deadline of 0.
    // May be true even if `in_time` is true.
    bool behind_forward = false;
    // Once all of these events are reached, the store ops have read the inference engine's blocks. Each event
    // comes with the kind of the op that it belongs to.
    std::vector<std::pair<OpKind, std::shared_ptr<StreamEvent>>> events = {};
  };
  // Waits until the graph's store ops have read the inference engine's blocks. With `on_streams`, expedites
  // the store ops and waits only until the lanes have enqueued these reads. An op that stores to disk cannot
  // be enqueued on a stream: if it waits behind a forward pass that is still running, this function does not
  // wait for it. Throws ContractError if submit() never returned `ticket`.
  Enqueued enqueue_all(int64_t ticket, double deadline_s, bool on_streams);
  // Allows the gated graphs with these tickets to copy layers [0, layers). The copies start after `fence` if
  // it is not null. Graphs that have finished and layers that are already open are ignored. Throws, and opens
  // no layer, if a graph has fewer layers (BlockRangeError) or if submit() never returned one of the tickets
  // (ContractError).
  void open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                   const std::shared_ptr<StreamEvent>& fence);
  // Cancels the graph's pages that no lane has taken. Returns the number of cancelled pages. Throws
  // ContractError if submit() never returned `ticket`.
  int64_t cancel(int64_t ticket);

  // A file descriptor that is readable if and only if poll() would return a result. Callers must not read
  // from it.
  int event_fd() const { return event_fd_; }
  // Returns the state of each kind that a lane serves.
  std::vector<LaneState> lanes() const;

  // Makes submit() refuse further graphs, cancels queued pages, and makes take() return null to the lanes.
  // May be called again.
  void begin_close();
  // Waits until no work item is in flight. Returns false if the deadline passes first.
  bool wait_quiet(double deadline_s);
  bool closing() const;

  // The body of the watchdog thread, which runs until close. If a work item makes no progress for
  // `op_stuck_s` seconds, takes down the item's kind of op. Sleeps while no item is in flight.
  void watch();

  // The body of the thread that checks slots, which runs until close. Some load ops wait until read ops of
  // another transfer engine have filled their slots. This thread starts the pages of these load ops when the
  // slots are filled, and skips pages whose read failed. Sleeps while no load op waits for slots.
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
    size_t open = 0;      // number of ops that have not finished
    size_t unpolled = 0;  // number of ops whose results have not been polled
  };
  struct KindQueue {
    int32_t lane = -1;  // number of the kind's lane; -1: no lane serves the kind
    std::array<std::map<uint64_t, OpState*>, kPriorities> runnable;  // ops with a ready page, oldest first
    std::array<int32_t, kPriorities> places{};                       // number of queue entries in use
    std::map<uint64_t, OpState*> open;                               // ops that have not finished
    bool up = true;
    std::string down_reason;
    int64_t times_down = 0;
  };
  // A step that must follow when an op or a page has ended: an op or a page that waited for it must start or
  // end, too. These steps are kept in a list instead of being handled recursively, because a chain of ops may
  // be as long as the queues, and recursion would be as deep.
  struct Consequence {
    enum class Kind { kStart, kEndOp, kEndPage } kind;
    OpState* op;
    int32_t page = -1;
    std::string reason = {};
  };
  // An op, and those of its pages whose slots another transfer engine has not yet filled completely from
  // disk.
  struct Coming {
    std::shared_ptr<OpState> op;
    std::vector<int32_t> pages;
  };
  struct LaneEntry {
    std::shared_ptr<Lane> lane;
    std::condition_variable work;
    int32_t idle = 0;   // number of threads that sleep in take()
    int32_t woken = 0;  // number of these threads that were notified but have not run yet
    // Number of consecutive work items that overtook a less urgent op. There is one counter per kind if the
    // lane's kinds_are_apart(); otherwise only the first counter is used.
    std::array<int32_t, kOpKinds> urgent_streaks{};
  };

  KindQueue& queue_of(const OpState& op) { return queues_[static_cast<size_t>(op.spec().kind)]; }
  Lane& lane_of(const OpState& op) { return *lanes_[static_cast<size_t>(queue_of(op).lane)]->lane; }
  // Wakes the op's lane if work items of this op are in flight. The pages of these items are not in the state
  // kReady, so update_runnable() does not wake the lane for them.
  void wake_lane_of_moving(OpState& op) {
    if (op.moving_pages() > 0) lane_of(op).wake(op.spec().kind);
  }
  // Remembers a finished graph for wait_layer(). If more than kRememberedGraphs are remembered, moves the
  // oldest one to `forgotten`. The caller destroys `forgotten` after it has released the lock, because
  // destroying an event calls the driver.
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
  // Notified when an op finishes, when a layer is done, and when no item is in flight any more.
  std::condition_variable progress_;
  std::condition_variable watchdog_;  // notified when the first work item is taken, and at close
  std::condition_variable arrivals_;  // notified when a load op has to wait for slots, and at close
  std::vector<std::unique_ptr<LaneEntry>> lanes_;
  std::array<KindQueue, kOpKinds> queues_;
  std::map<int64_t, Graph> graphs_;
  std::deque<int64_t> remembered_;  // tickets of finished graphs whose results were polled, oldest first
  std::unordered_set<int64_t> op_ids_;
  std::deque<std::pair<OpResult, std::shared_ptr<OpState>>> results_;
  std::atomic<bool> has_results_{false};        // whether results_ is not empty; set before event_fd_ changes
  std::set<std::shared_ptr<WorkItem>> moving_;  // work items in flight
  std::deque<Consequence> consequences_;        // empty whenever no thread holds the lock
  std::list<Coming> coming_;
  std::vector<std::shared_ptr<OpState>> expedited_;  // expedited ops that have not finished
  int64_t next_ticket_ = 1;
  uint64_t next_sequence_ = 1;
  bool watchdog_idle_ = false;
  bool closing_ = false;
};

}  // namespace flexkv
