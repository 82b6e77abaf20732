// A work item under way: the parts in which it is enqueued, and how each of its pages ends. One direction's
// thread uses it; this code does not call the driver.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/copy_ways.h"
#include "transfer/digest_crew.h"
#include "transfer/lane.h"

namespace flexkv::cuda {

// Some pages of an item on their way through some of its stages. It ends when all its portions have ended.
struct Part {
  std::vector<size_t> indices;  // of the item's positions
  std::vector<PageEnds> pages;  // one for each of `indices`
  int32_t first_stage = 0, last_stage = 0;
  bool last_of_stages = false;  // with this part, all pages of the item are on their way through its stages
  bool registered = true;       // all of the pages' memory is registered with the device
  SplitRuns runs;
  // If one kernel copies all runs and counts its stages: for each stage, the number of runs.by_kernel up to
  // its end.
  std::vector<size_t> stage_runs;
  std::vector<std::shared_ptr<StreamEvent>> stage_points;  // behind each stage, once that kernel is enqueued
  std::optional<CopyLister> copies;                        // lists runs.by_engine, from the first portion on
  // The lane keeps these from the first portion until the part ends.
  int portions = 0;  // under way
  bool enqueued = false;
  MoveResult bad;  // how all its pages end, if not kOk
};

class ItemMove {
 public:
  // `usable` decides which way its runs go; see copy_ways.h.
  ItemMove(std::shared_ptr<WorkItem> item, Direction direction, const Capabilities& usable);

  const std::shared_ptr<WorkItem>& item() const { return item_; }
  bool ended() const { return unfinished_ == 0; }
  // Whether the item may still get later stages: some were not open or had not arrived when it was taken.
  // False once it is over.
  bool may_grow() const { return !over_ && item_->last_stage() + 1 < item_->stages(); }

  // The part that is being enqueued. If there is none, begins the next one; its pages are under way from then
  // on. Null if there is no next one. If a load has digests, the crew checks the bytes of its pages here:
  // only pages with the right bytes are in the part, and the others are refused. `layers_bytes` bounds what
  // one kernel takes of several layers; see kLayersLaunchBytes.
  const std::shared_ptr<Part>& part(DigestCrew& digests, int64_t layers_bytes = kLayersLaunchBytes);
  // Whether part() may be enqueued now. Not while a refused page is under way: its earlier layers must end
  // before the page does, and before later layers are reported.
  bool may_enqueue() const { return !over_ && refused_under_way_ == 0 && (now_ || has_next()); }
  // The first stage that part() has or will have.
  int32_t stage() const { return now_ ? now_->first_stage : stage_; }
  // Call when all of part() is enqueued.
  void part_is_enqueued() { now_.reset(); }

  // Enqueues no more of the item; pages that are not completely enqueued end with `why`.
  void stop(const MoveResult& why);
  bool stopped() const { return over_.has_value(); }
  // Records that the part has ended, and ends the pages that wait for no other part.
  void end(const Part& part);

  // Pages that have ended since the last call.
  struct Ended {
    std::vector<size_t> indices;
    std::vector<MoveResult> results;
  };
  Ended take_ended();

 private:
  struct Page {
    int32_t under_way = 0;            // parts
    std::unique_ptr<MoveResult> bad;  // how it ends, if not successfully
    bool through = false;             // it has passed all of the item's stages
    bool finished = false;
  };

  bool has_next() const { return good_ > 0 && stage_ <= item_->last_stage(); }
  bool may_count_stages() const;
  bool has_short_runs_only(int32_t stage) const;
  void begin_pass(int64_t layers_bytes);
  int64_t most_bytes(bool registered) const;
  std::shared_ptr<Part> cut();
  void skip_bad_pages();
  bool may_move(size_t index) const { return !pages_[index].bad && !pages_[index].finished; }
  void spoil(size_t index, const MoveResult& why);
  void finish_if_over(size_t index);

  const std::shared_ptr<WorkItem> item_;
  const Direction direction_;
  const AttachedView& view_;
  const Capabilities usable_;
  const int64_t kernel_below_;
  bool has_short_runs_ = false;
  std::vector<Page> pages_;
  Ended ended_;
  size_t unfinished_;
  size_t good_;
  size_t refused_under_way_ = 0;
  std::optional<MoveResult> over_;
  std::shared_ptr<Part> now_;
  // Where the next part begins. A pass takes all pages through the stages from first_of_pass_ to
  // last_of_pass_; before the first pass, last_of_pass_ is less than stage_.
  int32_t first_of_pass_, last_of_pass_;
  bool counts_stages_ = false;  // one kernel takes the pass, and counts its stages
  int32_t stage_;
  size_t page_ = 0;
  bool first_ = true;
};

}  // namespace flexkv::cuda
