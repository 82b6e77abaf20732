// The data plane: takes transfer graphs, checks them, has its lanes move the pages, and reports how each op
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
  int32_t queue_ops = 1024;  // queue entries for each (kind, priority); held until an op's result is polled
  int32_t copy_threads = 1;  // shared by both directions of host copies
  double op_stuck_s = 30.0;  // a work item that makes no progress for longer takes its lane down; <= 0: never
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
  // Closes. Threads whose bytes still move after that go on alone, and the memory that they use stays.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // From now on `view` moves the stripe of `group`, which lies at `stripe_offset` in the slots of `pool`; its
  // run digests lie at `digest_offset`. Throws GeometryError when one of them does not fit, or when the view
  // shares bytes with another group's view other than block by block (block i of one with block i of the
  // other, as hybrid models alias them), ContractError when the group has a view already, ClosedError for a
  // closed pool.
  void attach_view(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
                   int64_t stripe_offset, int64_t digest_offset = kNoDigests);
  // Ops in flight keep using the view. Returns its number among those detached, for released_views(). Throws
  // ContractError for an unknown group.
  int64_t detach_view(int32_t group);
  // Numbers of detached views that no op uses any more: their memory may be freed. Returns each number once.
  std::vector<int64_t> released_views();

  // Queues all of the graph and returns its ticket, or queues none of it and returns nothing when a queue is
  // full (BUSY). Never blocks. Throws before anything is queued: BlockRangeError (block or slot),
  // ContractError (group, kind, edges, lengths, a target that is named twice in one op), ClosedError.
  // `stream` is the engine's, for lanes that need one (ContractError if it is missing, or given to a lane
  // without streams). Copies start after the work that it has been given so far; those of a gated graph after
  // the work that it had been given when open_layers() named the layer.
  std::optional<int64_t> submit(GraphSpec graph, std::optional<StreamId> stream = std::nullopt);
  std::vector<OpResult> poll(size_t max_results);
  int event_fd() const { return scheduler_->event_fd(); }
  bool wait(int64_t ticket, double deadline_s);
  LayerWait wait_layer(int64_t ticket, int32_t layer, double deadline_s);
  // Returns when the layer's copies are enqueued, not when they have ended, and makes `stream` wait for them;
  // if pages failed, it names them and adds no wait. Throws ContractError for a lane without streams, and for
  // a stream that is captured into a graph.
  LayerWait wait_layer_on(int64_t ticket, int32_t layer, double deadline_s, StreamId stream);
  struct Ordered {
    bool in_time = false;
    // Asking again does not help before the engine's stream has made progress. Always false with a deadline
    // of 0; may be true even if in time.
    bool behind_forward = false;
    explicit operator bool() const { return in_time; }
  };
  // Makes the work that `stream` is given from now on start after the graph's stores have read the engine's
  // blocks. Returns when those reads are enqueued, not when they have ended; without a stream (for a lane
  // that has none), when they have ended. Not in time: the deadline passed, and no wait was added. That
  // answer comes at once where a store to disk, which must end, waits behind a forward pass that still runs.
  // Throws ContractError for a ticket that was never given and for a stream that is captured into a graph,
  // and as submit does for the stream.
  Ordered order_after(int64_t ticket, double deadline_s, std::optional<StreamId> stream = std::nullopt);
  // A point after all work that `stream` has been given so far, for the fence of a graph that is submitted
  // later. Throws ContractError for an engine whose lanes have no streams.
  std::shared_ptr<StreamEvent> record(StreamId stream);
  // Allows layers [0, layers) of these gated graphs to be copied, after the work that `stream` (for lanes
  // that need one) has been given so far, which writes them. Idempotent. Throws ContractError for a ticket
  // that was never given, BlockRangeError for more layers than a graph has, and as submit does for the
  // stream.
  void open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                   std::optional<StreamId> stream = std::nullopt);
  int64_t cancel(int64_t ticket);
  std::vector<LaneState> lanes() const;

  // Cancels queued pages and waits for those that move. True: nothing moves, and the threads have ended.
  // False: something still moves, and its memory must stay; call again. Results can be polled afterwards.
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
