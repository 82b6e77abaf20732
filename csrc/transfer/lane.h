// The interface between the scheduler, which decides which pages may move, and the lanes, which move them.
//
// Lanes take their work from the scheduler. A lane whose own threads copy bytes blocks in take(). A lane with
// an asynchronous device (a GPU stream, an io_uring) keeps several work items in flight with try_take(), and
// the scheduler calls the lane's wake() when there may be more work. The scheduler alone handles priority,
// preemption, cancellation and deadlines, for all lanes.
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
  // Blocks until there is a work item for lane number `lane`, and returns it. Returns null when the transfer
  // engine closes; the calling thread must then return.
  virtual std::shared_ptr<WorkItem> take(int32_t lane) = 0;
  // Returns a work item of one of the kinds in `allowed`, or null if there is none. Also returns null while a
  // more urgent item of another kind waits, unless the lane's kinds_are_apart(): a store must not overtake
  // a load for which the lane has no capacity yet.
  virtual std::shared_ptr<WorkItem> try_take(int32_t lane, KindSet allowed) = 0;
  // Returns a work item of an expedited op, or null if there is none. A lane with streams must enqueue this
  // item even if it has its maximum of work in flight, because the work in flight may be waiting for the
  // inference engine.
  virtual std::shared_ptr<WorkItem> try_take_expedited(int32_t lane) = 0;
  // For a lane that takes all stages: adds later stages to an item, if they were opened or arrived in their
  // slots after the lane took the item. Without this call, these stages would become ready only after the
  // item's copies have finished, which may have to wait for the inference engine. Returns whether
  // last_stage() has grown. Preconditions: only one thread of the lane makes this call, and some page of the
  // item is unfinished.
  virtual bool extend(const std::shared_ptr<WorkItem>& item) = 0;
  // The lane calls this when the copies of the item's stages up to `stage` are enqueued on a stream for all
  // unfinished pages. `events` are points after consecutive stages, in order. The last event is after
  // `stage`. The first event also stands for all earlier stages. For a cancelled store, `stage` may include
  // stages that will never be enqueued. The call is optional, and must come before finish().
  virtual void issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
                      std::span<const std::shared_ptr<StreamEvent>> events) = 0;
  // The lane calls this when the copies of the item's stages up to `stage` have finished for all unfinished
  // pages. The call is optional, and only for stages before the last.
  virtual void passed(const std::shared_ptr<WorkItem>& item, int32_t stage) = 0;
  // Finishes a work item with one result per position. The lane calls this after the item's last byte has
  // stopped moving. The lane must finish every item that it has taken.
  virtual void finish(const std::shared_ptr<WorkItem>& item, const std::vector<MoveResult>& results) = 0;
  // Finishes some pages of a work item, given by their index in positions(). Lanes whose pages finish one by
  // one call this instead of finish(). Every page must be finished exactly once.
  virtual void finish_pages(const std::shared_ptr<WorkItem>& item, const std::vector<size_t>& indices,
                            const std::vector<MoveResult>& results) = 0;
};

// A part of the transfer engine that executes the ops of some kinds. Callers pass lanes to the engine's
// constructor.
class Lane {
 public:
  virtual ~Lane() = default;
  // Reserves the lane for the transfer engine that calls this, because a lane's threads take work from one
  // engine only. Returns false if the lane is already reserved.
  bool claim() { return !claimed_.exchange(true); }
  // Undoes claim() for an engine whose construction failed.
  void unclaim() { claimed_ = false; }
  virtual const char* name() const = 0;
  virtual KindSet kinds() const = 0;
  // How many work items the lane can have in flight. If this many are stuck, no other item of the lane can
  // move.
  virtual int32_t concurrency() const = 0;
  // Unit: bytes. The maximum size of a work item, unless a single page is larger. If the lane takes all
  // stages, an item of a layerwise op has all ready pages, whatever their size.
  virtual int64_t item_bytes() const { return kSubBatchBytes; }
  // Whether a work item may have several stages: all stages that are open and have arrived. The lane moves
  // them in order. If false, an item has one stage.
  virtual bool takes_all_stages() const { return false; }
  // Whether the lane's kinds are independent, so that items of one kind do not wait for more urgent items of
  // another kind.
  virtual bool kinds_are_apart() const { return false; }
  // Checks an op of a kind that has places or no device side. Returns the size of the op's pages, which is
  // used only if the op has no view, and the stages of a layerwise op. Throws the exceptions of
  // TransferEngine::submit if the lane cannot run the op, or if its group or one of its slots or places does
  // not exist.
  virtual PageSizes check(const OpSpec& op) const;
  // Whether the lane itself detects work items that hang. If so, the transfer engine's watchdog only reports
  // stuck items and does not take the lane down.
  virtual bool watches_itself() const { return false; }
  // Starts the lane's threads. The transfer engine calls this when the first op of the lane's kinds is
  // submitted. If the call throws, the engine calls it again at the next such op. The threads must own
  // everything they use, `source` included, because they outlive the lane if a device hangs for ever.
  virtual void start(std::shared_ptr<WorkSource> source, int32_t lane) = 0;
  // The scheduler calls this when there may be a work item of this kind for try_take() or
  // try_take_expedited(), or when an item in flight may be extended or was cancelled. The scheduler holds its
  // lock during the call, so this function must only signal a thread.
  virtual void wake(OpKind) {}
  // The scheduler calls this when a page of a kDiskRead has finished, even if no lane took the page. The
  // scheduler holds its lock during the call, so this function must not block.
  virtual void read_ended(const OpSpec&, int32_t /*page*/, bool /*verified*/) {}
  // The scheduler calls this when layers [0, layers) of a page of a layerwise kDiskRead are in place and
  // verified, and more layers will follow. The scheduler holds its lock during the call, so this function
  // must not block.
  virtual void read_advanced(const OpSpec&, int32_t /*page*/, int32_t /*layers*/) {}
  // Whether the lane copies on streams, so that submit() needs the inference engine's stream for its ops.
  // record() and make_wait() are called only if this is true.
  virtual bool needs_stream() const { return false; }
  // Returns a point after all work enqueued on `stream` so far. Throws CapacityError if the driver cannot
  // record it, and ContractError while the stream is being captured into a graph.
  virtual std::shared_ptr<StreamEvent> record(StreamId) { return nullptr; }
  // Makes `stream` wait for `event`: work that is enqueued on it after this call starts after `event`.
  // Returns an empty string on success, otherwise an error; the caller may then wait on the host instead.
  // Throws ContractError while the stream is being captured into a graph.
  virtual std::string make_wait(StreamEvent&, StreamId) { return {}; }
  // Joins the threads. Precondition: the transfer engine is closing, and no work item is in flight.
  virtual void join() = 0;
  // Detaches the threads. Called instead of join() if work items are stuck.
  virtual void abandon() = 0;

 private:
  std::atomic<bool> claimed_{false};
};

}  // namespace flexkv
