// The state of one op from submit to its result: its pages, its dependencies and its outcome. The class has
// no lock of its own; the scheduler's lock guards it.
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

// The figure shows four pages of a layerwise load op and, for each page, who may read or write its bytes. A
// read from disk is still filling the pages' slots: the layers of stage 3 are not there yet ("absent"). The
// lane takes a page through several stages at once.
//
//   layers    0        4        8        12       16
//             | stage 0| stage 1| stage 2| stage 3|
//   page 0    | passed | item A | item A | absent |    only the lane, in the stages of its item;
//   page 1    | passed | item A | item A | absent |    extend() adds stage 3 when it has been read
//   page 2    | passed | failed . . . . . . . . . |    nobody: its later stages are never moved
//   page 3    | ready or waiting . . . . . . . .  |    nobody until a lane takes the page
//
// A page is in at most one work item. The inference engine may use the blocks of a load op only after the op
// has finished. If the op is layerwise, the inference engine may use the layers of a stage as soon as every
// page has passed that stage. The op keeps the memory of the view and the host pool mapped until it has
// finished.
class OpState : public PageProgress, public std::enable_shared_from_this<OpState> {
 public:
  // `view`: null only for a kind without a device side; `sizes` then gives the size of a page instead.
  OpState(OpSpec spec, int64_t ticket, uint64_t sequence, std::shared_ptr<const AttachedView> view,
          PageSizes sizes = {});

  const OpSpec& spec() const { return spec_; }
  int64_t ticket() const { return ticket_; }
  uint64_t sequence() const { return sequence_; }
  const std::shared_ptr<const AttachedView>& view() const { return view_; }

  // Closes all stages, so that a stage is moved only after open() has opened it. Must be called before any
  // page is ready.
  void gate();
  // Opens the stages whose layers are all in [0, layers). Stages opened by this call are copied after
  // `fence`, which may be null.
  void open(int32_t layers, const std::shared_ptr<StreamEvent>& fence);
  // The event after which copies of this stage may start; may be null.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const;

  struct Taken {
    int32_t first_stage = 0;  // the current stage of all the pages
    int32_t last_stage = 0;   // the last stage through which the lane is to move the pages
    std::vector<int32_t> pages;
  };
  // Takes ready pages that are at the same stage: at least one page, and at most `max_bytes` bytes if there
  // are several. With `all_stages`, also takes the later stages of these pages, as far as they are open and
  // their layers are in the slots. With `all_stages`, a layerwise op takes all ready pages at the stage,
  // whatever their size. Precondition: has_ready().
  Taken take(int64_t max_bytes, bool all_stages);
  // Ends a page that has not ended yet. `end`: the page's new state, one of the failure states. The first
  // reason given becomes the reason of the op. `cause` is used only if `end` is kFailed; the other states
  // imply a cause.
  void fail(int32_t page, PageState end, const std::string& reason,
            FailureCause cause = FailureCause::kUnknown);
  // Records that an op without pages failed, because the op was cancelled or skipped, or because its lane is
  // down.
  void fail_empty(PageState end, const std::string& reason);

  // Marks the op as expedited: all of it must be enqueued at once, because the inference engine's stream will
  // wait for it.
  void expedite() { expedited_ = true; }
  bool expedited() const { return expedited_; }

  // Records the digests of a page's runs, which the lane has computed. The op's result will contain them.
  void keep_digests(int32_t page, const std::vector<uint64_t>& digests);
  // Returns the result of the op. Its status is CANCELLED, SKIPPED or LANE_DOWN only if no lane took any page
  // and all pages ended in the same state. Precondition: all_settled().
  OpResult result() const;
  // Releases the op's reference to the memory that it reads and writes. Precondition: all_settled().
  void release_view() { view_.reset(); }

  // The scheduler maintains the following members.
  int32_t waiting_barriers = 0;  // number of unfinished ops that the op waits for because of barrier edges
  // Per page: number of stream edges that it waits for. Empty if the op has no such edges.
  std::vector<int32_t> waiting_streams;
  std::vector<std::pair<OpState*, EdgeKind>> successors;  // the ops that wait for this one
  Priority effective_priority = Priority::kLoad;          // the highest priority of the op and its successors
  std::shared_ptr<StreamEvent> fence;                     // the fence of the op's graph; may be null
  // For each stage, a point after the last copy of the stage that was enqueued; null if none was.
  std::vector<std::shared_ptr<StreamEvent>> stage_events;
  // A point after the last copy of the op that was enqueued; null if none was.
  std::shared_ptr<StreamEvent> last_event;
  // Lanes read the next two members without the scheduler's lock.
  std::atomic<bool> cancelled{false};  // if true, the lane enqueues no more of the op
  // Whether a caller cancelled the op, so that even copies in flight may end early. Not set when the transfer
  // engine closes, because pages in flight are then still finished.
  std::atomic<bool> unwanted{false};
  bool ended = false;  // whether the op has its result

 private:
  int64_t bytes_of(int32_t first_stage, int32_t last_stage) const;
  FailureCause cause(int32_t page) const;

  const OpSpec spec_;
  const int64_t ticket_;
  const uint64_t sequence_;
  std::shared_ptr<const AttachedView> view_;
  const int64_t page_bytes_;
  std::vector<std::shared_ptr<StreamEvent>> stage_fences_;  // fence per stage; empty if the op is not gated
  std::vector<FailureCause> causes_;    // cause per page; empty until a page fails with a known cause
  std::atomic<bool> expedited_{false};  // lanes read it without the scheduler's lock
  PageState empty_end_ = PageState::kOk;
  std::string reason_;
  // Digests of all pages, with equally many for each page; empty until a page has digests.
  std::vector<uint64_t> digests_;
};

}  // namespace flexkv
