// How far one op has got, page by page. No lock, no threads: the scheduler's lock guards it.
//
// A page goes through stages: ranges of layers. Those of a layerwise op are one layer each, unless its lane
// names others; those of other copies between a view and a slot are the view's ranges(); any other op has a
// single stage of all layers. A layerwise op moves the lowest stage of all its pages first; any other op
// finishes pages that it has begun before it begins more.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/attached_view.h"
#include "transfer/op.h"

namespace flexkv {

enum class PageState : uint8_t {
  kWaiting,  // for predecessors, for its slot to be filled, or for its stage to be opened
  kReady,    // to be taken by a lane, at its current stage
  kMoving,   // its bytes may be moving
  kOk,
  kFailed,
  kCancelled,
  kSkipped,
  kLaneDown,
};
// What one page is, over all ranks and layers.
struct PageSizes {
  int64_t bytes = 1;
  int32_t layers = 1;
  // The first layer of each stage of a layerwise op, from 0. Empty: one stage per layer.
  std::vector<int32_t> stages = {};
};
constexpr bool is_open(PageState state) { return state <= PageState::kMoving; }

class OpState : public std::enable_shared_from_this<OpState> {
 public:
  // `view` may be null only for a kind without a device side: `sizes` then say what a page is.
  OpState(OpSpec spec, int64_t ticket, uint64_t sequence, std::shared_ptr<const AttachedView> view,
          PageSizes sizes = {});

  const OpSpec& spec() const { return spec_; }
  int64_t ticket() const { return ticket_; }
  uint64_t sequence() const { return sequence_; }
  const std::shared_ptr<const AttachedView>& view() const { return view_; }
  int32_t pages() const { return static_cast<int32_t>(states_.size()); }
  int32_t stages() const { return static_cast<int32_t>(left_.size()); }
  int32_t layers() const { return layers_; }
  // The layers of one stage, [lo, hi).
  std::pair<int32_t, int32_t> layers_of(int32_t stage) const;
  // The stage that moves this layer; the last one for a layer that the op does not have.
  int32_t stage_of(int32_t layer) const;

  PageState state(int32_t page) const { return states_[static_cast<size_t>(page)]; }
  bool has_ready() const { return ready_pages_ > 0; }
  int32_t moving_pages() const { return moving_pages_; }
  bool all_settled() const { return open_pages_ == 0; }
  bool issued() const { return issued_; }
  // Whether every page has passed (or will never pass) this stage.
  bool stage_done(int32_t stage) const;

  // From now on only open stages are moved, and none is open before open(). Call before any page is ready.
  void gate();
  // Opens the stages of layers [0, layers); those that were not open are copied after `fence`, if there is
  // one.
  void open(int32_t layers, const std::shared_ptr<StreamEvent>& fence);
  // What a copy of this stage must come after; may be null.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const;

  // Records that layers [0, layers) of a page, which a read elsewhere brings, are in its slot. Returns
  // whether there are more than before.
  bool arrive(int32_t page, int32_t layers);
  // Whether what the page's current stage moves is in its slot.
  bool has_arrived(int32_t page) const;
  // Layers of the page that have passed their stage: [0, layers_done).
  int32_t layers_done(int32_t page) const;

  // kWaiting -> kReady, at once or when the page's stage is opened. Precondition: has_arrived().
  void make_ready(int32_t page);
  struct Taken {
    int32_t first_stage = 0;  // the current one of the pages; they are to move through all up to the last
    int32_t last_stage = 0;
    std::vector<int32_t> pages;
  };
  // Takes up to `max_bytes` of ready pages (at least one), all at the same stage. `all_stages`: also takes
  // their later stages that are open and have arrived, and of a layerwise op all ready pages. Precondition:
  // has_ready().
  Taken take(int64_t max_bytes, bool all_stages);
  // The highest stage, from `last` on, up to which all stages are open and have arrived for all these pages.
  int32_t last_free(const std::vector<int32_t>& pages, int32_t last) const;
  // Records that a moving page has passed its stages up to this one; it may have passed them before. Returns
  // whether that was the last page to pass one of them.
  bool pass(int32_t page, int32_t stage);
  // The same, and then kMoving -> kReady for its next stage, kWaiting if that has not arrived or is not open,
  // kOk after the last.
  bool advance(int32_t page, int32_t stage);
  // Records that the bytes of a page's stages up to this one are on their way: only the device decides when
  // they arrive.
  void mark_issued(int32_t page, int32_t stage);
  // Whether the bytes of every page at this stage are on their way, in place, or will never come.
  bool stage_issued(int32_t stage) const;
  // Any open state -> `end`, one of the bad ones. The first reason given becomes the op's. `cause` counts
  // only if `end` is kFailed: the other states imply theirs.
  void fail(int32_t page, PageState end, const std::string& reason,
            FailureCause cause = FailureCause::kUnknown);

  // Marks the op because the engine's stream is to be ordered behind it.
  void expedite() { expedited_ = true; }
  bool expedited() const { return expedited_; }
  // Whether every page's last bytes are on their way, in place, or will never come.
  bool all_issued() const { return unissued_.back() == 0; }

  // Keeps the digests that a lane gave for a page's bytes, for the op's result.
  void keep_digests(int32_t page, const std::vector<uint64_t>& digests);

  // Records how an op without pages ended that was not allowed to run.
  void fail_empty(PageState end, const std::string& reason);

  // Precondition: all_settled(). CANCELLED, SKIPPED and LANE_DOWN only if no byte of any page moved.
  OpResult result() const;
  std::vector<int32_t> failed_pages() const;
  // Lets go of the memory that the op could touch. Precondition: all_settled().
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
  struct ReadyList {
    std::vector<int32_t> pages;
    size_t head = 0;
    bool empty() const { return head == pages.size(); }
  };

  int32_t stage_at(int32_t page) const { return stage_.empty() ? 0 : stage_[static_cast<size_t>(page)]; }
  FailureCause cause(int32_t page) const;

  OpSpec spec_;
  int64_t ticket_;
  uint64_t sequence_;
  std::shared_ptr<const AttachedView> view_;
  int64_t page_bytes_ = 0;
  int32_t layers_ = 0;
  std::vector<int32_t> starts_;  // first layer of each stage
  std::vector<PageState> states_;
  std::vector<FailureCause> causes_;           // per page; empty until one fails with a known cause
  std::vector<int32_t> stage_;                 // per page, only if there are several stages
  std::vector<int32_t> arrived_;               // per page: layers in its slot; empty without `reads`
  std::vector<ReadyList> ready_;               // per stage
  std::vector<int32_t> left_;                  // per stage: pages that have not passed it
  std::vector<int32_t> unissued_;              // per stage: pages that are not on their way through it
  std::vector<int32_t> issued_stages_;         // per page: how many stages are on their way, or passed
  int32_t open_stages_ = 0;                    // stages below this one may move
  std::vector<std::vector<int32_t>> at_gate_;  // per stage of a gated op: pages that wait for it to be opened
  std::vector<std::shared_ptr<StreamEvent>> stage_fences_;  // per stage of a gated op
  int32_t lowest_ready_ = 0;                                // no stage below has a ready page
  int32_t ready_pages_ = 0;
  int32_t moving_pages_ = 0;
  int32_t open_pages_ = 0;
  bool issued_ = false;
  std::atomic<bool> expedited_{false};  // read by the lane without the scheduler's lock
  PageState empty_end_ = PageState::kOk;
  std::string reason_;
  std::vector<uint64_t> digests_;  // equally many per page, once one page has any
};

}  // namespace flexkv
