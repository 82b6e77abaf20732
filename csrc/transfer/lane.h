// The interface between the scheduler, which decides which pages may move, and the lanes, which move the
// pages.
//
// Lanes take work items from the scheduler. If a lane's own threads copy the bytes, they wait for work in
// take(). A lane with an asynchronous device (a GPU stream, an io_uring) keeps several work items in flight
// with try_take(), and the scheduler calls the lane's wake() when there may be more work. The scheduler alone
// handles priority, preemption, cancellation and deadlines, for all lanes.
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
  // more urgent item of another kind waits, because a store must not overtake a load for which the lane has
  // no capacity yet. A lane whose kinds_are_apart() is an exception.
  virtual std::shared_ptr<WorkItem> try_take(int32_t lane, KindSet allowed) = 0;
  // Returns a work item of an expedited op, or null if there is none. A lane with streams must enqueue this
  // item even if it has its maximum of work in flight, because the work in flight may be waiting for the
  // inference engine.
  virtual std::shared_ptr<WorkItem> try_take_expedited(int32_t lane) = 0;
  // For a lane that takes all stages: adds later stages to an item, if they were opened, or read from disk
  // into their slots, after the lane took the item. Without this call, these stages would become ready only
  // after the item's copies have finished, which may have to wait for the inference engine. Returns whether
  // last_stage() has grown. Preconditions: only one thread of the lane makes this call, and some page of the
  // item is unfinished.
  virtual bool extend(const std::shared_ptr<WorkItem>& item) = 0;
  // The lane calls this when the copies of the item's stages up to `stage` are enqueued on a stream for all
  // unfinished pages. Each of `events` is a point after one stage. The stages of `events` are consecutive,
  // and the last one is `stage`. The first event is also the point after all earlier stages. For a cancelled
  // store op, `stage` may include stages that will never be enqueued. The call is optional, and must come
  // before finish().
  virtual void issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
                      std::span<const std::shared_ptr<StreamEvent>> events) = 0;
  // The lane calls this when the copies of the item's stages up to `stage` have finished for all unfinished
  // pages. The call is optional, and the lane may make it only for stages before the last.
  virtual void passed(const std::shared_ptr<WorkItem>& item, int32_t stage) = 0;
  // Finishes a work item with one result per page, in the order of the item's positions(). The lane calls
  // this when none of the item's bytes is being moved any more. The lane must finish every item that it has
  // taken.
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
  // The maximum number of work items that the lane can have in flight. If this many are stuck, no other item
  // of the lane can move.
  virtual int32_t concurrency() const = 0;
  // Unit: bytes. The maximum size of a work item, unless a single page is larger. If the lane takes all
  // stages, this limit does not apply to layerwise ops: an item has all ready pages, whatever their size.
  virtual int64_t item_bytes() const { return kSubBatchBytes; }
  // Whether the lane takes work items with several stages: all stages that are open and whose layers are in
  // their slots. The lane moves the stages in order. If false, an item has one stage.
  virtual bool takes_all_stages() const { return false; }
  // Whether the lane's kinds are independent, so that items of one kind do not wait for more urgent items of
  // another kind.
  virtual bool kinds_are_apart() const { return false; }
  // Checks an op whose kind has places or has no device side. Returns the size of the op's pages (used only
  // if the op has no view) and the stages of a layerwise op. Throws the exceptions of TransferEngine::submit
  // if the lane cannot run the op, or if its group or one of its slots or places does not exist.
  virtual PageSizes check(const OpSpec& op) const;
  // Whether the lane itself detects work items that hang. If so, the transfer engine's watchdog only reports
  // stuck items and does not take the lane down.
  virtual bool watches_itself() const { return false; }
  // Starts the lane's threads. The transfer engine calls this when the first op of the lane's kinds is
  // submitted. If start() throws, the engine calls it again when the next op of these kinds is submitted. The
  // threads must keep everything that they use alive, `source` included, because they outlive the lane if a
  // device hangs for ever.
  virtual void start(std::shared_ptr<WorkSource> source, int32_t lane) = 0;
  // The scheduler calls this when there may be a work item of this kind for try_take() or
  // try_take_expedited(), when an item in flight may be extended, or when one was cancelled. The scheduler
  // holds its lock during the call, so this function must only signal a thread.
  virtual void wake(OpKind) {}
  // The scheduler calls this when a page of a kDiskRead op has finished, even if no lane took the page. The
  // scheduler holds its lock during the call, so this function must not block.
  virtual void read_ended(const OpSpec&, int32_t /*page*/, bool /*verified*/) {}
  // The scheduler calls this when layers [0, layers) of a page of a layerwise kDiskRead op are in the page's
  // slot and verified, and more layers will follow. The scheduler holds its lock during the call, so this
  // function must not block.
  virtual void read_advanced(const OpSpec&, int32_t /*page*/, int32_t /*layers*/) {}
  // Whether the lane copies on streams, so that submit() needs the inference engine's stream for its ops.
  // record() and make_wait() are called only if this is true.
  virtual bool needs_stream() const { return false; }
  // Returns a point after all work enqueued on `stream` so far. Throws CapacityError if the driver cannot
  // record it, and ContractError while the stream is being captured into a CUDA graph.
  virtual std::shared_ptr<StreamEvent> record(StreamId) { return nullptr; }
  // Makes `stream` wait for `event`: work that is enqueued on `stream` after this call starts only after
  // `event`. Returns an empty string on success, otherwise an error message; the caller's thread may then
  // wait for `event` instead. Throws ContractError while the stream is being captured into a CUDA graph.
  virtual std::string make_wait(StreamEvent&, StreamId) { return {}; }
  // Joins the threads. Precondition: the transfer engine is closing, and no work item is in flight.
  virtual void join() = 0;
  // Detaches the threads. Called instead of join() if work items are stuck.
  virtual void abandon() = 0;

 private:
  std::atomic<bool> claimed_{false};
};

}  // namespace flexkv
