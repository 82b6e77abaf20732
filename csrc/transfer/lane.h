// The border between the scheduler, which knows which pages may move, and the lanes, which move them.
//
// Lanes pull. A lane that copies with threads of its own blocks in take(); one that owns an asynchronous
// device (a GPU stream, an io_uring) keeps several items under way with try_take() and is woken by wake().
// Priority, preemption, cancel and deadlines are decided here once, for all of them.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transfer/page_mover.h"
#include "transfer/page_progress.h"
#include "transfer/sub_batch.h"
#include "transfer/work_item.h"

namespace flexkv {

class WorkSource {
 public:
  virtual ~WorkSource() = default;
  // Blocks until there is a work item for lane `lane`. Returns null when the engine is closing; the thread
  // must then end.
  virtual std::shared_ptr<WorkItem> take(int32_t lane) = 0;
  // A work item of one of the kinds in `allowed`, or null. Also null while a more urgent item of another kind
  // waits, unless the lane's kinds_are_apart(): a store must not overtake a load for which the lane has no
  // room yet.
  virtual std::shared_ptr<WorkItem> try_take(int32_t lane, KindSet allowed) = 0;
  // A work item of an expedited op, or null. For a lane with streams, which enqueues the item however much is
  // under way, because the work under way may itself wait for the engine.
  virtual std::shared_ptr<WorkItem> try_take_expedited(int32_t lane) = 0;
  // For a lane that takes all stages: adds to an item the stages that have become free since it was taken,
  // because they were opened or arrived in their slots. Otherwise they would be ready only after the item's
  // bytes have arrived, which may wait for the engine. Returns whether last_stage() has grown. The lane calls
  // this from one thread, while some page of the item is unfinished.
  virtual bool extend(const std::shared_ptr<WorkItem>& item) = 0;
  // The lane calls this when the bytes of the item's stages up to this one, for all its unfinished pages, are
  // enqueued on a stream. `events` are points after the last of these stages, one for each, in order; the
  // first one also counts for the stages before. For a cancelled store it may name stages that will never be
  // enqueued. Optional, and before finish().
  virtual void issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
                      std::span<const std::shared_ptr<StreamEvent>> events) = 0;
  // The lane calls this when the bytes of the item's stages up to this one have arrived, for all its
  // unfinished pages. Optional, for stages before the last.
  virtual void passed(const std::shared_ptr<WorkItem>& item, int32_t stage) = 0;
  // Ends a work item, after its last byte has stopped moving, with one result per position. Every item taken
  // must be finished.
  virtual void finish(const std::shared_ptr<WorkItem>& item, const std::vector<MoveResult>& results) = 0;
  // Ends some pages of a work item, by their index in positions(), for lanes whose pages end one by one.
  // Every page must be finished once.
  virtual void finish_pages(const std::shared_ptr<WorkItem>& item, const std::vector<size_t>& indices,
                            const std::vector<MoveResult>& results) = 0;
};

// Executes the ops of some kinds. Registered with the engine before the first submit.
class Lane {
 public:
  virtual ~Lane() = default;
  // Binds the lane to one transfer engine for its whole life: its threads pull only from that engine's queue.
  // False if the lane already has an engine.
  bool claim() { return !claimed_.exchange(true); }
  // Undoes claim() for an engine whose construction failed.
  void unclaim() { claimed_ = false; }
  virtual const char* name() const = 0;
  virtual KindSet kinds() const = 0;
  // How many items can be under way at once: if that many are stuck, no other item of this lane can move
  // either.
  virtual int32_t concurrency() const = 0;
  // Unit: bytes. The most that it takes as one item, unless a single page is larger. A lane that takes all
  // stages takes all ready pages of a layerwise op.
  virtual int64_t item_bytes() const { return kSubBatchBytes; }
  // Whether an item has all free stages of its pages, which the lane moves in order, instead of one stage.
  virtual bool takes_all_stages() const { return false; }
  // Whether its kinds are independent: items of one kind do not wait for more urgent items of another.
  virtual bool kinds_are_apart() const { return false; }
  // For kinds that have places or no device side: checks the op, and returns the size of a page if no view
  // gives it, and the stages of a layerwise op. Throws what submit throws if the op cannot be run, or names a
  // group, slot or place that does not exist.
  virtual PageSizes check(const OpSpec& op) const;
  // Whether the lane itself finds hanging items and ends those that it can end: the engine's watchdog then
  // only names them.
  virtual bool watches_itself() const { return false; }
  // Called when the first op of these kinds is submitted, and again if it threw: threads are started here,
  // not before. They must own everything they use (including `source`), because they may outlive the lane
  // object if a device hangs for ever.
  virtual void start(std::shared_ptr<WorkSource> source, int32_t lane) = 0;
  // Called when there may be a work item of this kind for try_take() or try_take_expedited(), or one under
  // way that can be extended with extend() or was cancelled. Under the scheduler's lock: only signal.
  virtual void wake(OpKind) {}
  // Called when a page of a kDiskRead has ended, even one that no lane took. Under the scheduler's lock: only
  // signal.
  virtual void read_ended(const OpSpec&, int32_t /*page*/, bool /*verified*/) {}
  // Called when layers [0, layers) of a page of a layerwise kDiskRead are in place and verified, and more
  // layers will follow. Under the scheduler's lock: only signal.
  virtual void read_advanced(const OpSpec&, int32_t /*page*/, int32_t /*layers*/) {}
  // Whether graphs for it must name the engine's stream. Only then are record() and make_wait() called.
  virtual bool needs_stream() const { return false; }
  // A point after all work enqueued on `stream` so far. Throws CapacityError; ContractError while the
  // stream is captured into a graph.
  virtual std::shared_ptr<StreamEvent> record(StreamId) { return nullptr; }
  // Makes work that is enqueued on `stream` from now on start after `event`. Empty, or why that failed: the
  // caller may wait on the host instead. Throws as record() does.
  virtual std::string make_wait(StreamEvent&, StreamId) { return {}; }
  // Joins the threads, after take() has returned null and no item is under way.
  virtual void join() = 0;
  // Called instead of join() if items are stuck: detaches the threads.
  virtual void abandon() = 0;

 private:
  std::atomic<bool> claimed_{false};
};

}  // namespace flexkv
