// What a lane has under way: some pages of one op, at one stage or at several.
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

// Pages of one op on their way through one stage, or through several if the lane takes all stages: extend()
// then raises the last one and changes nothing else. The lane calls touch() whenever a page is done. The op's
// memory stays mapped until finish(). See the figure at OpState.
class WorkItem {
 public:
  OpKind kind() const { return kind_; }
  const std::vector<int32_t>& positions() const { return positions_; }
  int32_t first_stage() const { return first_stage_; }
  int32_t last_stage() const { return last_stage_; }
  // The op's number of stages; this item has some of them.
  int32_t stages() const { return op_->stages(); }
  int32_t layer_lo() const { return op_->layers_of(first_stage_).first; }
  int32_t layer_hi() const { return op_->layers_of(last_stage_).second; }
  std::pair<int32_t, int32_t> layers_of(int32_t stage) const { return op_->layers_of(stage); }
  bool layerwise() const { return op_->spec().layerwise; }
  PageMove page(size_t index) const;
  // A point after the work that was enqueued on the engine's stream before submit, or before the stage of a
  // gated graph was opened; null if there is no fence.
  const std::shared_ptr<StreamEvent>& fence_of(int32_t stage) const { return op_->fence_of(stage); }
  const std::shared_ptr<StreamEvent>& fence() const { return fence_of(last_stage_); }
  // Whether the engine's stream will be ordered behind the op, so that all of the op must be enqueued at
  // once.
  bool expedited() const { return op_->expedited(); }
  // Whether no more of the op need be enqueued.
  bool cancelled() const { return op_->cancelled; }
  // Whether copies of it that are under way may end early, too.
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
  // Guarded by the scheduler's lock.
  size_t unfinished_ = 0;
  int32_t issued_stages_ = 0;
  bool advanced_ = false;  // one of its pages has moved on and may be in another item
  std::atomic<Clock::rep> last_moved_{0};
  // The watchdog's, guarded by the scheduler's lock.
  Clock::rep seen_moved_ = 0;
  int32_t quiet_looks_ = 0;
  bool stuck_ = false;
};

}  // namespace flexkv
