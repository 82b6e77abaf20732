// One op from submit to its result: its pages, its dependencies, its outcome. No lock, no threads: the
// scheduler's lock guards it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/attached_view.h"
#include "transfer/op.h"
#include "transfer/page_progress.h"

namespace flexkv {

// Who may touch the bytes of a page, stage by stage, while the op is open. Four pages of a load whose lane
// takes all stages that are free:
//
//   layers    0        4        8        12       16
//             | stage 0| stage 1| stage 2| stage 3|
//   page 0    | passed | item A | item A | closed |    the lane alone, in the stages of its item;
//   page 1    | passed | item A | item A | closed |    extend() adds stage 3 once it is opened
//   page 2    | passed | failed . . . . . . . . . |    nobody: no later stage of it will move
//   page 3    | ready or waiting . . . . . . . .  |    nobody, until a lane takes the page
//
// A page is in one item at most. The engine may not use any page's blocks before the op has ended, or, in a
// layerwise op, the layers of a stage before every page has passed it. The op keeps all the memory mapped.
class OpState : public PageProgress, public std::enable_shared_from_this<OpState> {
 public:
  // `view` may be null only for a kind without a device side: `sizes` then give the size of a page.
  OpState(OpSpec spec, int64_t ticket, uint64_t sequence, std::shared_ptr<const AttachedView> view,
          PageSizes sizes = {});

  const OpSpec& spec() const { return spec_; }
  int64_t ticket() const { return ticket_; }
  uint64_t sequence() const { return sequence_; }
  const std::shared_ptr<const AttachedView>& view() const { return view_; }

  // From now on only open stages are moved, and none is open before open(). Call before any page is ready.
  void gate();
  // Opens the stages of layers [0, layers); those that were not open are copied after `fence`, if there is
  // one.
  void open(int32_t layers, const std::shared_ptr<StreamEvent>& fence);
  // The event that copies of this stage must come after; may be null.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const;

  struct Taken {
    int32_t first_stage = 0;  // the current one of the pages; they are to move through all up to the last
    int32_t last_stage = 0;
    std::vector<int32_t> pages;
  };
  // Takes up to `max_bytes` of ready pages (at least one), all at the same stage. `all_stages`: also takes
  // the later stages of these pages that are open and have arrived; for a layerwise op it takes all ready
  // pages at the stage, whatever `max_bytes` is. Precondition: has_ready().
  Taken take(int64_t max_bytes, bool all_stages);
  // Any open state -> `end`, one of the bad ones. The first reason given becomes the op's. `cause` counts
  // only if `end` is kFailed: the other states imply theirs.
  void fail(int32_t page, PageState end, const std::string& reason,
            FailureCause cause = FailureCause::kUnknown);
  // Records the end of an op without pages that was not allowed to run.
  void fail_empty(PageState end, const std::string& reason);

  // Marks the op because the engine's stream will be ordered behind it.
  void expedite() { expedited_ = true; }
  bool expedited() const { return expedited_; }

  // Keeps the digests that a lane gave for a page's bytes, for the op's result.
  void keep_digests(int32_t page, const std::vector<uint64_t>& digests);
  // Precondition: all_settled(). CANCELLED, SKIPPED and LANE_DOWN only if no byte of any page moved.
  OpResult result() const;
  // Releases the memory that the op could touch. Precondition: all_settled().
  void release_view() { view_.reset(); }

  // Predecessors that have not ended, by kind of edge, and the ops that wait for this one. The scheduler
  // keeps them.
  int32_t waiting_barriers = 0;
  std::vector<int32_t> waiting_streams;  // per page; empty without stream edges
  std::vector<std::pair<OpState*, EdgeKind>> successors;
  Priority effective_priority = Priority::kLoad;
  std::shared_ptr<StreamEvent> fence;  // its graph's
  // Per stage: after the last item of it that was issued.
  std::vector<std::shared_ptr<StreamEvent>> stage_events;
  std::shared_ptr<StreamEvent> last_event;  // after the last item that was issued
  // The next two are read by the lane without the scheduler's lock.
  std::atomic<bool> cancelled{false};
  std::atomic<bool> unwanted{false};  // cancelled by a caller: at close, pages under way may still arrive
  bool ended = false;

 private:
  int64_t bytes_of(int32_t first_stage, int32_t last_stage) const;
  FailureCause cause(int32_t page) const;

  const OpSpec spec_;
  const int64_t ticket_;
  const uint64_t sequence_;
  std::shared_ptr<const AttachedView> view_;
  const int64_t page_bytes_;
  std::vector<std::shared_ptr<StreamEvent>> stage_fences_;  // per stage of a gated op
  std::vector<FailureCause> causes_;    // per page; empty until one fails with a known cause
  std::atomic<bool> expedited_{false};  // read by the lane without the scheduler's lock
  PageState empty_end_ = PageState::kOk;
  std::string reason_;
  std::vector<uint64_t> digests_;  // equally many per page, once one page has any
};

}  // namespace flexkv
