// A work item under way: in which parts it is enqueued, and how each of its pages ends. Of one direction's
// thread; nothing here calls the driver.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/copy_plan.h"
#include "cuda/copy_ways.h"
#include "transfer/digest_crew.h"
#include "transfer/lane.h"

namespace flexkv::cuda {

// Some pages of an item through some of its stages. It ends when all its portions have.
struct Part {
  std::vector<size_t> indices;  // of the item's positions
  std::vector<PageEnds> pages;  // the same
  int32_t first_stage = 0, last_stage = 0;
  bool last_of_stages = false;  // with it all pages of the item are on their way through these
  bool registered = true;       // the device knows all of the pages' memory
  SplitRuns runs;
  EngineWay way;                     // of runs.by_engine
  std::optional<CopyLister> copies;  // of runs.by_engine, from its first portion on
  // The lane's, while it enqueues it and until it ends.
  int portions = 0;  // under way
  bool enqueued = false;
  MoveResult bad;  // of all its pages, where that is not kOk
};

class ItemMove {
 public:
  // `usable` decides which way its runs go; see copy_ways.h.
  ItemMove(std::shared_ptr<WorkItem> item, Direction direction, const Capabilities& usable);

  const std::shared_ptr<WorkItem>& item() const { return item_; }
  bool ended() const { return unfinished_ == 0; }
  // Whether stages may have become free that it was taken without.
  bool may_grow() const { return !over_ && item_->last_stage() + 1 < item_->stages(); }

  // The part that is enqueued, or the next one from now on; null: there is none. Pages of the next are under
  // way with it. Of a load that has digests these are only those whose bytes are right, which the crew checks
  // here; the others are refused.
  const std::shared_ptr<Part>& part(DigestCrew& digests);
  // Whether part() is to be enqueued now. Not while a page that was refused is under way: its earlier layers
  // must end before it does, and before anything is said of later ones.
  bool may_enqueue() const { return !over_ && refused_under_way_ == 0 && (now_ || has_next()); }
  // The stage that part() has or will have first.
  int32_t stage() const { return now_ ? now_->first_stage : stage_; }
  // All of part() is enqueued.
  void part_is_enqueued() { now_.reset(); }

  // From now on nothing of it is enqueued; pages of which something would have to be end like this.
  void stop(const MoveResult& why);
  bool stopped() const { return over_.has_value(); }
  // The part has ended: it is behind its pages.
  void end(const Part& part);

  // Pages that end now, each once.
  struct Ended {
    std::vector<size_t> indices;
    std::vector<MoveResult> results;
  };
  Ended take_ended();

 private:
  struct Page {
    int32_t under_way = 0;  // parts
    bool bad = false;
    bool through = false;  // all of the item's stages
    bool finished = false;
  };

  bool has_next() const { return good_ > 0 && stage_ <= item_->last_stage(); }
  void begin_pass();
  int64_t most_bytes() const;
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
  std::vector<std::pair<size_t, MoveResult>> why_bad_;  // of pages that have not finished
  size_t unfinished_;
  size_t good_;
  size_t refused_under_way_ = 0;
  std::optional<MoveResult> over_;
  std::shared_ptr<Part> now_;
  // Where the next part begins. A pass takes all pages through stages that end with last_of_pass_.
  int32_t first_of_pass_, last_of_pass_ = 0;
  int32_t stage_;
  size_t page_ = 0;
  bool first_ = true;
};

}  // namespace flexkv::cuda
