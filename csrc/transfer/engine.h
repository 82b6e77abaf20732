// The data plane: takes transfer graphs, checks them, lets its lanes move the pages, and reports how each op
// ended.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transfer/host_pool.h"
#include "transfer/lane.h"
#include "transfer/op.h"
#include "transfer/page_mover.h"
#include "transfer/scheduler.h"

namespace flexkv {

struct EngineOptions {
  int32_t queue_ops = 1024;  // entries per (kind, priority); an op holds one until its result is polled
  int32_t copy_threads = 1;  // shared by both directions of host copies
  double op_stuck_s = 30.0;  // a work item without progress for longer takes its lane down; <= 0: never
};

// All methods may be called from any thread, in the process that made the engine: its threads do not follow a
// fork. In a forked child they throw ClosedError, except released_views(), closing and destroying, which do
// nothing there.
class TransferEngine {
 public:
  // Runs `lanes` beside the host copies, or instead of them if one of the lanes is a device's. Throws
  // ConfigError for options out of range, ContractError when two lanes serve one kind, or one serves another
  // engine.
  TransferEngine(std::shared_ptr<PageMover> mover, const EngineOptions& options,
                 std::vector<std::shared_ptr<Lane>> lanes = {});
  // Closes. Threads whose bytes still move after that keep running, and keep the memory that they use.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Attaches `view` to `group`: ops then move the stripe at `stripe_offset` in the slots of `pool`, whose run
  // digests lie at `digest_offset`. Throws GeometryError if one of them does not fit, or if the view shares
  // bytes with another group's view other than block i with block i (as hybrid models alias them),
  // ContractError if the group already has a view, ClosedError for a closed pool.
  void attach_view(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
                   int64_t stripe_offset, int64_t digest_offset = kNoDigests);
  // Ops in flight keep using the view. Returns a number for the detached view, which released_views() will
  // report. Throws ContractError for an unknown group.
  int64_t detach_view(int32_t group);
  // Returns the numbers of detached views that no op uses any more, so that their memory may be freed.
  // Returns each number once.
  std::vector<int64_t> released_views();

  // Queues the whole graph and returns its ticket or, if a queue is full (BUSY), queues none of it and
  // returns nothing. Never blocks. Throws before anything is queued: BlockRangeError (block or slot),
  // ContractError (group, kind, edges, lengths, a target that is named twice in one op), ClosedError.
  // `stream` is the engine's, for lanes that need one (ContractError if it is missing, or given to a lane
  // without streams). Copies start after the work enqueued on it so far; those of a gated graph start after
  // the work enqueued on it when open_layers() named the layer.
  std::optional<int64_t> submit(GraphSpec graph, std::optional<StreamId> stream = std::nullopt);
  std::vector<OpResult> poll(size_t max_results);
  // Whether poll() would return any result. Does not wait for a lock.
  bool has_results() const;
  int event_fd() const { return scheduler_->event_fd(); }
  bool wait(int64_t ticket, double deadline_s);
  LayerWait wait_layer(int64_t ticket, int32_t layer, double deadline_s);
  // Makes `stream` wait for the layer's copies, and returns when these are enqueued, not when they have
  // ended. If pages failed, it names them and adds no wait. Throws ContractError for a lane without streams,
  // and for a stream that is captured into a graph.
  LayerWait wait_layer_on(int64_t ticket, int32_t layer, double deadline_s, StreamId stream);
  struct Ordered {
    bool in_time = false;
    // Whether calling again is pointless until the engine's stream has made progress. Always false with a
    // deadline of 0; may be true even if in time.
    bool behind_forward = false;
    explicit operator bool() const { return in_time; }
  };
  // Makes work that is enqueued on `stream` from now on start after the graph's stores have read the engine's
  // blocks. Returns when those reads are enqueued, not when they have ended; without a stream (for a lane
  // that has none), returns when they have ended. Not in time: the deadline passed, and no wait was added. It
  // returns this at once if a store to disk, which cannot be enqueued, waits behind a forward pass that still
  // runs. Throws ContractError for a ticket that was never returned and for a stream that is being captured
  // into a graph, and as submit does for the stream.
  Ordered order_after(int64_t ticket, double deadline_s, std::optional<StreamId> stream = std::nullopt);
  // Records a point after all work enqueued on `stream` so far, for the fence of a graph that is submitted
  // later. Throws ContractError for an engine whose lanes have no streams.
  std::shared_ptr<StreamEvent> record(StreamId stream);
  // Lets these gated graphs copy layers [0, layers), after the work enqueued so far on `stream` (for lanes
  // that need one), which writes them. Idempotent. Throws ContractError for a ticket that was never returned,
  // BlockRangeError for more layers than a graph has, and as submit does for the stream.
  void open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                   std::optional<StreamId> stream = std::nullopt);
  int64_t cancel(int64_t ticket);
  std::vector<LaneState> lanes() const;

  // Cancels queued pages and waits for those that are moving. True: nothing moves any more, and the threads
  // have ended. False: some bytes still move, and their memory must stay; call again. Results can be polled
  // afterwards.
  bool close(double deadline_s);

 private:
  void start_lanes(const GraphSpec& graph);
  void make_fence(GraphSpec& graph, std::optional<StreamId> stream) const;
  Lane* lane_of(OpKind kind) const;
  bool forked() const;
  void require_home(const char* what) const;

  std::shared_ptr<Scheduler> scheduler_;  // shared with threads that may outlive this
  std::vector<std::shared_ptr<Lane>> lanes_;
  KindSet kinds_ = 0;
  const double op_stuck_s_;
  const pid_t home_;      // the process whose threads these are
  std::mutex lifecycle_;  // guards started_, both watching threads, ended_: starting and joining threads
  std::vector<bool> started_;
  std::thread watchdog_;
  std::thread slot_watch_;  // started once a load waits for reads of another transfer engine
  bool ended_ = false;
  mutable std::mutex views_mutex_;
  std::map<int32_t, std::shared_ptr<const AttachedView>> views_;
  std::map<int64_t, std::weak_ptr<const AttachedView>> detached_;
  int64_t next_detached_ = 0;
};

}  // namespace flexkv
