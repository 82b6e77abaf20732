// How far one op has got, page by page. No lock, no threads: the scheduler's lock guards it.
//
// A page goes through stages: ranges of layers. Those of a layerwise op are one layer each, where its lane
// names no others; those of other copies between a view and a slot are the view's ranges(); else there is a
// single one of all layers. A layerwise op moves the lowest stage of all its pages first, the others finish
// pages that have begun before they begin more.
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
  kWaiting,  // for predecessors
  kReady,    // to be taken by a lane, at its current stage
  kMoving,   // its bytes may be moving
  kOk,
  kFailed,
  kCancelled,
  kSkipped,
  kLaneDown,
};
// Of one page, all ranks and layers.
struct PageSizes {
  int64_t bytes = 1;
  int32_t layers = 1;
  std::vector<int32_t> stages = {};  // first layer of each stage of a layerwise op, from 0; none: all layers
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

  // From now on only open stages are moved: none before open(). Before any page is ready.
  void gate();
  // Opens the stages of layers [0, layers); those that were not open are copied after `fence`, if there is
  // one.
  void open(int32_t layers, const std::shared_ptr<StreamEvent>& fence);
  // What a copy of this stage must come after; may be null.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const;

  // Layers [0, layers) of a page that a read elsewhere brings are in its slot. Returns whether that is news.
  bool arrive(int32_t page, int32_t layers);
  // Whether what the page's current stage moves is in its slot.
  bool has_arrived(int32_t page) const;
  // Layers of the page that have passed their stage: [0, layers_done).
  int32_t layers_done(int32_t page) const;

  // kWaiting -> kReady, or when the page's stage is opened. Precondition: has_arrived().
  void make_ready(int32_t page);
  struct Taken {
    int32_t first_stage = 0;  // of what is to be moved; the pages are at the last
    int32_t last_stage = 0;
    std::vector<int32_t> pages;
  };
  // Takes up to `max_bytes` of ready pages (at least one), all at one stage; `all_stages`: with those of
  // their later ones that are open and have arrived. Precondition: has_ready().
  Taken take(int64_t max_bytes, bool all_stages);
  // The last stage, from `last` on, that is open and has arrived of all these pages.
  int32_t last_free(const std::vector<int32_t>& pages, int32_t last) const;
  // A moving page is behind its stages up to this one, which may be behind it already. Returns whether one of
  // them is done now, of all pages.
  bool pass(int32_t page, int32_t stage);
  // The same, and then kMoving -> kReady for its next stage, kWaiting where that has not arrived, or kOk
  // after the last.
  bool advance(int32_t page, int32_t stage);
  // The bytes of a page's stages up to this one are on their way: nothing but the device decides when they
  // arrive.
  void mark_issued(int32_t page, int32_t stage);
  // Whether the bytes of every page at this stage are on their way, in place, or will never come.
  bool stage_issued(int32_t stage) const;
  // Any open state -> `end`, one of the bad ones. The first reason given is the op's. `cause` counts where
  // `end` is kFailed: the others say it themselves.
  void fail(int32_t page, PageState end, const std::string& reason,
            FailureCause cause = FailureCause::kUnknown);

  // The engine's stream is to be ordered behind it.
  void expedite() { expedited_ = true; }
  bool expedited() const { return expedited_; }
  // Whether every page's last bytes are on their way, in place, or will never come.
  bool all_issued() const { return unissued_.back() == 0; }

  // What a page's lane says of its bytes; for the op's result.
  void keep_digests(int32_t page, const std::vector<uint64_t>& digests);

  // How an op without pages ended that was not let run.
  void fail_empty(PageState end, const std::string& reason);

  // Precondition: all_settled(). CANCELLED, SKIPPED and LANE_DOWN only if no byte of any page moved.
  OpResult result() const;
  std::vector<int32_t> failed_pages() const;
  // Lets go of the memory that the op could touch. Precondition: all_settled().
  void release_view() { view_.reset(); }

  // Predecessors of each kind that have not ended, and what waits for this op; kept by the scheduler.
  int32_t waiting_barriers = 0;
  std::vector<int32_t> waiting_streams;  // a page; empty without stream edges
  std::vector<std::pair<OpState*, EdgeKind>> successors;
  Priority effective_priority = Priority::kLoad;
  std::shared_ptr<StreamEvent> fence;  // of its graph
  std::vector<std::shared_ptr<StreamEvent>>
      stage_events;                         // a stage: after the last item of it that was issued
  std::shared_ptr<StreamEvent> last_event;  // after the last item that was issued
  // The next two are read by the lane without the scheduler's lock.
  std::atomic<bool> cancelled{false};
  std::atomic<bool> unwanted{false};  // cancelled by a caller; at close what is under way may still arrive
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
  std::vector<FailureCause> causes_;           // a page; empty until one fails with a known cause
  std::vector<int32_t> stage_;                 // a page, only when there are several stages
  std::vector<int32_t> arrived_;               // a page: layers in its slot; empty when all of all are
  std::vector<ReadyList> ready_;               // a stage
  std::vector<int32_t> left_;                  // a stage: pages that have not passed it
  std::vector<int32_t> unissued_;              // a stage: pages that are not on their way through it
  std::vector<int32_t> issued_stages_;         // a page: how many are on their way, or behind it
  int32_t open_stages_ = 0;                    // the stages before it may move
  std::vector<std::vector<int32_t>> at_gate_;  // a stage of a gated op: pages that wait for it to be opened
  std::vector<std::shared_ptr<StreamEvent>> stage_fences_;  // a stage of a gated op
  int32_t lowest_ready_ = 0;                                // no stage below has a ready page
  int32_t ready_pages_ = 0;
  int32_t moving_pages_ = 0;
  int32_t open_pages_ = 0;
  bool issued_ = false;
  std::atomic<bool> expedited_{false};  // read by the lane without the scheduler's lock
  PageState empty_end_ = PageState::kOk;
  std::string reason_;
  std::vector<uint64_t> digests_;  // as many a page, once one page has any
};

}  // namespace flexkv
