// A work item in flight: the parts in which it is enqueued, and the result of each of its pages. Only one
// thread uses it: that of the item's direction. This code does not call the driver.
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

// Some pages of a work item that are copied together through some of its stages. A part ends when all its
// portions have ended.
struct Part {
  std::vector<size_t> indices;  // index of each page in WorkItem::positions()
  std::vector<PageEnds> pages;  // one for each of `indices`
  int32_t first_stage = 0, last_stage = 0;
  bool last_of_stages = false;  // whether no later part has pages for these stages
  bool registered = true;       // whether all host memory of the pages is registered with the device
  SplitRuns runs;
  // If one kernel copies all runs and counts its stages, stage_runs[i] is the number of segments of
  // runs.by_kernel in the part's stages up to stage i of the part. Otherwise the vector is empty.
  std::vector<size_t> stage_runs;
  std::vector<std::shared_ptr<StreamEvent>> stage_points;  // per stage; empty until the kernel is enqueued
  std::optional<CopyLister> copies;  // lists runs.by_engine; set when the first portion is enqueued
  // LaneDirection updates the members below, from the part's first portion until the part ends.
  int portions = 0;  // number of portions in flight
  bool enqueued = false;
  MoveResult bad;  // if not kOk, the result of all pages of the part
};

class ItemMove {
 public:
  // `usable` says which copy paths may copy the item's runs. The functions of copy_ways.h choose among these
  // paths.
  ItemMove(std::shared_ptr<WorkItem> item, Direction direction, const Capabilities& usable);

  const std::shared_ptr<WorkItem>& item() const { return item_; }
  bool ended() const { return unfinished_ == 0; }
  // Whether later stages may still be added to the item. These stages were not open, or their layers were not
  // in the slots yet, when the lane took the item. False after stop().
  bool may_grow() const { return !over_ && item_->last_stage() + 1 < item_->stages(); }

  // Returns the part that is being enqueued. If there is none, begins the next part, whose pages then count
  // as in flight. Returns null if no part is left. For a load with digests, the crew first checks the bytes
  // of the part's pages in host memory. Pages with wrong bytes are refused and left out of the part.
  // `layers_bytes` limits how many bytes one kernel copies if it copies several layers; see
  // kLayersLaunchBytes.
  const std::shared_ptr<Part>& part(DigestCrew& digests, int64_t layers_bytes = kLayersLaunchBytes);
  // Whether part() may be enqueued now. This is false while earlier layers of a refused page are in flight.
  // The copies of these layers must end before the page ends, and before later layers are reported.
  bool may_enqueue() const { return !over_ && refused_in_flight_ == 0 && (now_ || has_next()); }
  // Returns the first stage of the current part or, if there is none, of the next part.
  int32_t stage() const { return now_ ? now_->first_stage : stage_; }
  // Must be called when the current part is completely enqueued.
  void part_is_enqueued() { now_.reset(); }

  // Ensures that no more of the item is enqueued. Pages that are not completely enqueued get the result
  // `why`.
  void stop(const MoveResult& why);
  bool stopped() const { return over_.has_value(); }
  // Records that the part has ended. Finishes those pages of the part that are completely copied or have
  // failed, unless another part in flight contains them.
  void end(const Part& part);

  // The pages that have ended since the last call, with their results.
  struct Ended {
    std::vector<size_t> indices;
    std::vector<MoveResult> results;
  };
  Ended take_ended();

 private:
  struct Page {
    int32_t in_flight = 0;            // number of parts in flight with this page
    std::unique_ptr<MoveResult> bad;  // why the page failed; null if it has not failed
    bool through = false;             // whether all of the item's stages of this page have been copied
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
  size_t refused_in_flight_ = 0;
  std::optional<MoveResult> over_;
  std::shared_ptr<Part> now_;
  // The next part begins at stage_ and page_. A pass copies the stages from first_of_pass_ to last_of_pass_
  // of all pages. Before the first pass, last_of_pass_ is less than stage_.
  int32_t first_of_pass_, last_of_pass_;
  bool counts_stages_ = false;  // whether one kernel copies the whole pass and counts its stages
  int32_t stage_;
  size_t page_ = 0;
  bool first_ = true;
};

}  // namespace flexkv::cuda
