// Progress of the pages of one op. No lock, no threads: the scheduler's lock guards it.
//
// A page goes through stages: ranges of layers. Those of a layerwise op are one layer each, unless its lane
// names others; those of other copies between a view and a slot are the view's ranges(); any other op has a
// single stage of all layers. A layerwise op moves the lowest stage of all its pages first; any other op
// finishes pages that it has begun before it begins more.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

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
constexpr bool is_open(PageState state) { return state <= PageState::kMoving; }

// State of one page, over all ranks and layers.
struct PageSizes {
  int64_t bytes = 1;
  int32_t layers = 1;
  // The first layer of each stage of a layerwise op, from 0. Empty: one stage per layer.
  std::vector<int32_t> stages = {};
};

// The layers of one page, and what the functions below say of them:
//
//   0                                                                              layers()
//   |  passed           |  issued            |  may be taken       |  not yet        |
//   '- layers_done() ---'                    |                     |
//   '- mark_issued(): on their way ----------'                     |
//   '- open(), and arrive() for a page that a read brings ---------'
//
// Each bound is the end of a stage, but for arrive(): a stage may be taken once all its layers have arrived.
class PageProgress {
 public:
  // `starts`: the first layer of each stage, from 0.
  PageProgress(int32_t pages, int32_t layers, std::vector<int32_t> starts, bool layerwise);

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
  // Whether any page was ever taken.
  bool issued() const { return issued_; }
  // Whether every page has passed (or will never pass) this stage.
  bool stage_done(int32_t stage) const { return left_[static_cast<size_t>(stage)] == 0; }
  // Whether the bytes of every page at this stage are on their way, in place, or will never come.
  bool stage_issued(int32_t stage) const { return unissued_[static_cast<size_t>(stage)] == 0; }
  bool all_issued() const { return unissued_.back() == 0; }
  // Whether the bytes that the page's current stage moves are in its slot.
  bool has_arrived(int32_t page) const;
  // Layers of the page that have passed their stage: [0, layers_done).
  int32_t layers_done(int32_t page) const;
  std::vector<int32_t> failed_pages() const;
  // The highest stage, from `last` on, up to which all stages are open and have arrived for all these pages.
  int32_t last_free(const std::vector<int32_t>& pages, int32_t last) const;

  // Makes the page wait for a read elsewhere, which brings its layers. Call before any page is ready.
  void expect(int32_t page);
  // Records that layers [0, layers) of an expected page are in its slot. Returns whether there are more than
  // before.
  bool arrive(int32_t page, int32_t layers);

  // kWaiting -> kReady, at once or when the page's stage is opened. Precondition: has_arrived().
  void make_ready(int32_t page);
  // Records that a moving page has passed its stages up to this one; it may have passed them before. Returns
  // whether that was the last page to pass one of them.
  bool pass(int32_t page, int32_t stage);
  // Like pass(), and then kMoving -> kReady for its next stage, kWaiting if that has not arrived or is not
  // open, kOk after the last.
  bool advance(int32_t page, int32_t stage);
  // Records that the bytes of a page's stages up to this one are on their way: only the device decides when
  // they arrive.
  void mark_issued(int32_t page, int32_t stage);

 protected:
  // From now on only open stages are moved, and none is open before open_to(). Call before any page is ready.
  void close_stages();
  // Opens the stages of layers [0, layers). Returns them, [lo, hi).
  std::pair<int32_t, int32_t> open_to(int32_t layers);
  // The stage that take_at() must take from. Precondition: has_ready().
  int32_t next_stage();
  // kReady -> kMoving for up to `most` pages of a stage, in the order in which they became ready.
  std::vector<int32_t> take_at(int32_t stage, size_t most);
  // Any open state -> `end`, one of the bad ones.
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
  std::vector<int32_t> stage_;                 // per page, only if there are several stages
  std::vector<int32_t> arrived_;               // per page: layers in its slot; empty if none is expected
  std::vector<ReadyList> ready_;               // per stage
  std::vector<int32_t> left_;                  // per stage: pages that have not passed it
  std::vector<int32_t> unissued_;              // per stage: pages that are not on their way through it
  std::vector<int32_t> issued_stages_;         // per page: how many stages are on their way, or passed
  int32_t open_stages_;                        // stages below this one may move
  std::vector<std::vector<int32_t>> at_gate_;  // per stage, once closed: pages that wait for it to be opened
  int32_t lowest_ready_ = 0;                   // no stage below has a ready page
  int32_t ready_pages_ = 0;
  int32_t moving_pages_ = 0;
  int32_t open_pages_;
  bool issued_ = false;
};

}  // namespace flexkv
