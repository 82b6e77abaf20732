// A work item: some pages of one op that a lane moves together, through one stage or several.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transfer/deadline.h"
#include "transfer/op_state.h"
#include "transfer/page_mover.h"

namespace flexkv {

// An item may have several stages if its lane takes all stages. WorkSource::extend() can then raise the
// item's last stage; it does not change the item's pages. The lane calls touch() whenever a page has made
// progress, so that the watchdog does not count the item as stuck. The memory of the pages stays mapped until
// finish(). The figure in the comment on OpState shows the stages of an item.
class WorkItem {
 public:
  OpKind kind() const { return kind_; }
  const std::vector<int32_t>& positions() const { return positions_; }
  int32_t first_stage() const { return first_stage_; }
  int32_t last_stage() const { return last_stage_; }
  // The number of stages of the op, which may be greater than the number of stages of this item.
  int32_t stages() const { return op_->stages(); }
  int32_t layer_lo() const { return op_->layers_of(first_stage_).first; }
  int32_t layer_hi() const { return op_->layers_of(last_stage_).second; }
  std::pair<int32_t, int32_t> layers_of(int32_t stage) const { return op_->layers_of(stage); }
  bool layerwise() const { return op_->spec().layerwise; }
  PageMove page(size_t index) const;
  // The point in the inference engine's stream after which copies of this stage may start; null if they may
  // start at once. In a gated graph, the point was recorded when the stage was opened.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const { return op_->fence_of(stage); }
  const std::shared_ptr<StreamEvent>& fence() const { return fence_of(last_stage_); }
  // Whether the whole op must be enqueued at once, because the inference engine's stream will wait for it.
  bool expedited() const { return op_->expedited(); }
  // Whether the op was cancelled, so that the rest of it does not have to be enqueued.
  bool cancelled() const { return op_->cancelled; }
  // Whether a caller cancelled the op, so that even its copies in flight may end early.
  bool unwanted() const { return op_->unwanted; }
  void touch() { last_moved_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed); }

 private:
  friend class Scheduler;
  std::shared_ptr<OpState> op_;
  std::shared_ptr<const AttachedView> view_;
  OpKind kind_ = OpKind::kH2D;
  int32_t lane_ = 0;
  int32_t first_stage_ = 0;
  int32_t last_stage_ = 0;
  std::vector<int32_t> positions_;
  // The scheduler's lock guards the next three members.
  size_t unfinished_ = 0;      // number of pages that have not finished
  int32_t issued_stages_ = 0;  // number of stages whose copies are enqueued
  // Whether a page has passed this item's stages, and so may be in another item already.
  bool advanced_ = false;
  std::atomic<Clock::rep> last_moved_{0};  // time of the last touch()
  // The watchdog uses the members below, under the scheduler's lock.
  Clock::rep seen_moved_ = 0;  // value of `last_moved_` at the last check
  int32_t quiet_looks_ = 0;    // number of checks in a row that found `last_moved_` unchanged
  bool stuck_ = false;
};

}  // namespace flexkv
