// The progress of the pages of one op. The class has no lock of its own; the scheduler's lock guards it.
//
// A page passes through stages. A stage is a range of layers. A layerwise op has one stage per layer, unless
// its lane gives other stages. Another op that copies between a view and a slot has the view's ranges() as
// stages. Any other op has a single stage with all layers. A layerwise op moves the lowest stage of all its
// pages before any page's next stage. In other ops, pages that have been begun are finished before more are
// begun.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace flexkv {

enum class PageState : uint8_t {
  kWaiting,  // waits for earlier ops, for a read op that fills its slot, or for its stage to be opened
  kReady,    // a lane may take the page at its current stage
  kMoving,   // a lane has taken the page, and its bytes may be moving
  kOk,
  kFailed,
  kCancelled,
  kSkipped,
  kLaneDown,
};
constexpr bool is_open(PageState state) { return state <= PageState::kMoving; }

// What Lane::check returns about the pages of an op. `bytes` and `layers` are used only if the op has no
// view.
struct PageSizes {
  int64_t bytes = 1;   // size of a page over all ranks and layers
  int32_t layers = 1;  // number of layers of a page
  // For a layerwise op, the first layer of each stage, in ascending order, beginning with 0. Empty: one stage
  // per layer.
  std::vector<int32_t> stages = {};
};

// The figure shows the layers of one page, and which functions set or return the bounds between them:
//
//   0                                                                              layers()
//   |  passed           |  issued            |  may be taken       |  not yet        |
//   '- layers_done() ---'                    |                     |
//   '- mark_issued(): copy enqueued ---------'                     |
//   '- open(), and arrive() for a page that a read brings ---------'
//
// Each bound is the end of a stage, except that the bound which arrive() sets may be within a stage. A lane
// may take a stage when arrive() has reported all layers of the stage.
class PageProgress {
 public:
  // `starts`: the first layer of each stage, in ascending order, beginning with 0.
  PageProgress(int32_t pages, int32_t layers, std::vector<int32_t> starts, bool layerwise);

  int32_t pages() const { return static_cast<int32_t>(states_.size()); }
  int32_t stages() const { return static_cast<int32_t>(left_.size()); }
  int32_t layers() const { return layers_; }
  // The layers of one stage, [lo, hi).
  std::pair<int32_t, int32_t> layers_of(int32_t stage) const;
  // Returns the stage that contains `layer`, or the last stage if the op has no such layer.
  int32_t stage_of(int32_t layer) const;

  PageState state(int32_t page) const { return states_[static_cast<size_t>(page)]; }
  bool has_ready() const { return ready_pages_ > 0; }
  int32_t moving_pages() const { return moving_pages_; }
  bool all_settled() const { return open_pages_ == 0; }
  // Whether a lane ever took a page of the op.
  bool issued() const { return issued_; }
  // Whether every page has passed this stage, or has failed.
  bool stage_done(int32_t stage) const { return left_[static_cast<size_t>(stage)] == 0; }
  // Whether the copies of this stage are enqueued for every page that has neither passed it nor failed.
  bool stage_issued(int32_t stage) const { return unissued_[static_cast<size_t>(stage)] == 0; }
  bool all_issued() const { return unissued_.back() == 0; }
  // Whether all layers of the page's current stage are in its slot.
  bool has_arrived(int32_t page) const;
  // Returns the number of layers in the stages that the page has passed: layers [0, layers_done()).
  int32_t layers_done(int32_t page) const;
  std::vector<int32_t> failed_pages() const;
  // Returns the highest stage to which the lane may go on from stage `last`: every stage in between is open,
  // and its layers are in the slots of all `pages`. Pages that are not being moved any more do not count.
  int32_t last_free(const std::vector<int32_t>& pages, int32_t last) const;

  // Makes the page wait for the read op that fills its slot; the read op may belong to another transfer
  // engine. Must be called before any page is ready.
  void expect(int32_t page);
  // Records that layers [0, layers) of a page for which expect() was called are in its slot. Returns whether
  // these are more layers than before.
  bool arrive(int32_t page, int32_t layers);

  // Changes a waiting page to kReady, at once or when its stage is opened. Precondition: has_arrived().
  void make_ready(int32_t page);
  // Records that a moving page has passed its stages up to `stage`; it may already have passed some of them.
  // Returns whether this page was the last one to pass any of these stages.
  bool pass(int32_t page, int32_t stage);
  // Does what pass() does, and changes the state of the page: to kOk after the last stage; to kWaiting if the
  // next stage is not open, or if its layers are not in the slot yet; otherwise to kReady.
  bool advance(int32_t page, int32_t stage);
  // Records that the copies of a page's stages up to `stage` are enqueued. From then on, when these copies
  // finish depends only on the device.
  void mark_issued(int32_t page, int32_t stage);

 protected:
  // Closes all stages, so that a stage is moved only after open_to() has opened it. Must be called before any
  // page is ready.
  void close_stages();
  // Opens the stages whose layers are all in [0, layers). Returns the range [lo, hi) of the stages that this
  // call has opened.
  std::pair<int32_t, int32_t> open_to(int32_t layers);
  // Returns the stage from which take_at() must take pages. Precondition: has_ready().
  int32_t next_stage();
  // Changes up to `most` ready pages at a stage to kMoving, in the order in which they became ready. Returns
  // these pages.
  std::vector<int32_t> take_at(int32_t stage, size_t most);
  // Ends a page that has not ended yet. `end`: the page's new state, one of the failure states.
  void end_page(int32_t page, PageState end);

 private:
  struct ReadyList {
    std::vector<int32_t> pages;
    size_t head = 0;
    bool empty() const { return head == pages.size(); }
  };

  int32_t stage_at(int32_t page) const { return stage_.empty() ? 0 : stage_[static_cast<size_t>(page)]; }

  const int32_t layers_;
  const bool layerwise_;
  const std::vector<int32_t> starts_;
  std::vector<PageState> states_;
  std::vector<int32_t> stage_;  // per page: its current stage; empty if there is only one stage
  // Per page: number of its layers that are in its slot. Empty if expect() was never called.
  std::vector<int32_t> arrived_;
  std::vector<ReadyList> ready_;   // per stage: the ready pages
  std::vector<int32_t> left_;      // per stage: number of pages that have neither passed the stage nor failed
  std::vector<int32_t> unissued_;  // per stage: number of pages whose copies are not enqueued
  std::vector<int32_t> issued_stages_;  // per page: number of stages whose copies are enqueued or done
  int32_t open_stages_;                 // number of open stages; pages can move only through these
  // Per stage: pages that wait for the stage to be opened. Empty if close_stages() was never called.
  std::vector<std::vector<int32_t>> at_gate_;
  int32_t lowest_ready_ = 0;  // no stage below this one has a ready page
  int32_t ready_pages_ = 0;
  int32_t moving_pages_ = 0;
  int32_t open_pages_;
  bool issued_ = false;
};

}  // namespace flexkv
