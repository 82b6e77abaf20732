// The data plane. The transfer engine checks the transfer graphs that callers submit, passes their pages to
// the lanes that move them, and reports the result of each op.
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
  int32_t queue_ops = 1024;  // queue entries per (kind, priority); an op takes one until its result is polled
  int32_t copy_threads = 1;  // threads for host copies (H2D and D2H together)
  // A work item without progress for this long counts as stuck; <= 0: items never count as stuck.
  double op_stuck_s = 30.0;
};

// The transfer engine of one process. All methods may be called from any thread of the process that made the
// engine. A forked child does not have the engine's threads, so most methods throw ClosedError there. Only
// released_views(), close() and the destructor do not throw in a forked child; they do nothing.
class TransferEngine {
 public:
  // Makes an engine with the given lanes and a lane for host copies, which uses `mover`. The lane for host
  // copies is left out if one of `lanes` copies on streams. Throws ConfigError if an option is out of range,
  // and ContractError if two lanes serve the same kind of op or a lane belongs to another engine.
  TransferEngine(std::shared_ptr<PageMover> mover, const EngineOptions& options,
                 std::vector<std::shared_ptr<Lane>> lanes = {});
  // Closes the engine and waits a short time. Threads that are still moving bytes then continue without the
  // engine, and keep the memory that they use alive.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Attaches `view` to `group`. From then on, ops of this group move blocks between the view and the stripe
  // at `stripe_offset` in the slots of `pool`. The stripe's run digests are at `digest_offset`; kNoDigests
  // means that there are none. Throws GeometryError if the stripe or its digests do not fit in a slot. Also
  // throws GeometryError if a block of the view shares bytes with a block of a different number in another
  // group's view. Blocks of the same number may share bytes, as in hybrid models. Throws ContractError if the
  // group already has a view, and ClosedError if the pool is closed.
  void attach_view(int32_t group, std::shared_ptr<const KvView> view, std::shared_ptr<HostPool> pool,
                   int64_t stripe_offset, int64_t digest_offset = kNoDigests);
  // Detaches the group's view, which ops in flight continue to use. Returns a number that identifies the
  // detached view. released_views() returns the number once no op uses the view any more. Throws
  // ContractError if the group has no view.
  int64_t detach_view(int32_t group);
  // Returns the numbers of those detached views that no op uses any more. The caller may free the views'
  // memory. Each number is returned once.
  std::vector<int64_t> released_views();

  // Queues the complete graph and returns its ticket. If a queue is full (BUSY), returns nullopt and queues
  // no op of the graph. Never blocks. `stream`: the inference engine's stream, required if the lanes have
  // streams, and refused if they have none. Copies start after the work enqueued on `stream` so far. A gated
  // graph is different: its copies start after the work that was enqueued on the stream of open_layers() at
  // the call of open_layers().
  //
  // Throws before anything is queued: BlockRangeError for an invalid block, slot or place; ContractError for
  // an invalid group, kind, edge, length or stream, or a target (the block, slot or place to be written) that
  // occurs twice in one op; ClosedError if the engine or a host pool is closed.
  std::optional<int64_t> submit(GraphSpec graph, std::optional<StreamId> stream = std::nullopt);
  // poll(), event_fd(), wait(), wait_layer(), cancel() and lanes() do what the Scheduler's methods of the
  // same names do.
  std::vector<OpResult> poll(size_t max_results);
  // Whether poll() would return any result. Does not wait for a lock.
  bool has_results() const;
  int event_fd() const { return scheduler_->event_fd(); }
  bool wait(int64_t ticket, double deadline_s);
  LayerWait wait_layer(int64_t ticket, int32_t layer, double deadline_s);
  // Makes `stream` wait for the copies of a layer. Returns when the copies are enqueued, which may be before
  // they have finished. If pages of the layer failed, the result lists them, and `stream` does not wait.
  // Throws ContractError if the engine's lanes have no streams, or if `stream` is being captured into a CUDA
  // graph.
  LayerWait wait_layer_on(int64_t ticket, int32_t layer, double deadline_s, StreamId stream);
  struct Ordered {
    bool in_time = false;
    // Whether the store ops still have to read blocks, but wait behind a forward pass that is still running.
    // If so, calling again is pointless until the inference engine's stream has made progress. Always false
    // with a deadline of 0. May be true even if `in_time` is true.
    bool behind_forward = false;
    explicit operator bool() const { return in_time; }
  };
  // Makes `stream` wait for the graph's store ops: work that is enqueued on `stream` after this call starts
  // only after the store ops have read the inference engine's blocks. Returns when these reads are enqueued,
  // which may be before they have finished. For lanes without streams, callers give no `stream`, and
  // order_after() returns when the reads have finished.
  //
  // `in_time` is false if the deadline passed; `stream` then does not wait. It is false at once if an op that
  // stores to disk waits behind a forward pass that is still running, because the reads of such an op cannot
  // be enqueued on a stream. Throws ContractError if submit() never returned `ticket`, if `stream` is missing
  // or refused as in submit(), or if `stream` is being captured into a CUDA graph.
  Ordered order_after(int64_t ticket, double deadline_s, std::optional<StreamId> stream = std::nullopt);
  // Records a point after all work enqueued on `stream` so far. A graph that is submitted later can use the
  // returned event as its fence: its copies then start after that work. Throws ContractError if the engine's
  // lanes have no streams.
  std::shared_ptr<StreamEvent> record(StreamId stream);
  // Allows the gated graphs with these tickets to copy layers [0, layers). The copies start after the work
  // enqueued on `stream` so far, which writes these layers. Calling it again for the same layers has no
  // effect. Throws ContractError if submit() never returned one of the tickets, or if `stream` is missing or
  // refused as in submit(); throws BlockRangeError if a graph has fewer layers.
  void open_layers(const std::vector<int64_t>& tickets, int32_t layers,
                   std::optional<StreamId> stream = std::nullopt);
  int64_t cancel(int64_t ticket);
  std::vector<LaneState> lanes() const;

  // Cancels queued pages and waits for pages in flight. Returns true if nothing moves any more and the
  // threads have finished. Returns false if some bytes are still being moved at the deadline: the memory that
  // these copies use must stay mapped, and the caller must call close() again. Results can still be polled
  // afterwards.
  bool close(double deadline_s);

 private:
  void start_lanes(const GraphSpec& graph);
  void make_fence(GraphSpec& graph, std::optional<StreamId> stream) const;
  Lane* lane_of(OpKind kind) const;
  bool forked() const;
  void require_home(const char* what) const;

  std::shared_ptr<Scheduler> scheduler_;  // shared with threads that may outlive the engine
  std::vector<std::shared_ptr<Lane>> lanes_;
  KindSet kinds_ = 0;
  const double op_stuck_s_;
  const pid_t home_;      // the process that made the engine and has its threads
  std::mutex lifecycle_;  // held while threads are started or ended; guards the members from here to `ended_`
  std::vector<bool> started_;
  std::thread watchdog_;
  // Started when a load first has to wait for another transfer engine that reads its slots from disk.
  std::thread slot_watch_;
  bool ended_ = false;
  mutable std::mutex views_mutex_;
  std::map<int32_t, std::shared_ptr<const AttachedView>> views_;
  std::map<int64_t, std::weak_ptr<const AttachedView>> detached_;
  int64_t next_detached_ = 0;
};

}  // namespace flexkv
