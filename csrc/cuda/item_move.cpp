#include "cuda/item_move.h"

#include <algorithm>
#include <utility>

namespace flexkv::cuda {
namespace {

// Unit: bytes. The maximum size of a part that the copy engine copies, and of a part whose digests the crew
// checks. The limit keeps waits short, because all pages of a part end at the same time.
constexpr int64_t kPartBytes = kSubBatchBytes;

}  // namespace

ItemMove::ItemMove(std::shared_ptr<WorkItem> item, Direction direction, const Capabilities& usable)
    : item_(std::move(item)),
      direction_(direction),
      view_(*item_->page(0).view),
      usable_(usable),
      kernel_below_(kernel_below(usable, direction)),
      pages_(item_->positions().size()),
      unfinished_(pages_.size()),
      good_(pages_.size()),
      first_of_pass_(item_->first_stage()),
      last_of_pass_(first_of_pass_ - 1),
      stage_(first_of_pass_) {
  const auto segments = view_.segments(0, view_.view().num_layers());
  has_short_runs_ = std::any_of(segments.begin(), segments.end(),
                                [&](const Segment& segment) { return segment.run_bytes < kernel_below_; });
}

// Whether one kernel can copy several stages of all pages while a stream waits for each stage. This is not
// possible if the pages have digests, because the bytes of later stages are checked while the bytes of
// earlier stages are copied.
bool ItemMove::may_count_stages() const {
  if (!usable_.stage_words || !item_->layerwise() || direction_ != Direction::kToDevice) return false;
  if (view_.has_digests() || pages_.size() > kLaunchPages) return false;
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (!view_.pool().registered(item_->page(index).slot)) return false;
  }
  return has_short_runs_only(stage_);
}

// Whether all runs of this stage are short enough for the kernel. This function checks the segments of the
// stage, not those of all layers: in pools that have all layers in a block, a layer's runs are short even if
// the whole page is one long run.
bool ItemMove::has_short_runs_only(int32_t stage) const {
  const auto layers = item_->layers_of(stage);
  const auto segments = view_.segments(layers.first, layers.second);
  return std::all_of(segments.begin(), segments.end(),
                     [&](const Segment& segment) { return segment.run_bytes < kernel_below_; });
}

// Chooses the stages of the next pass, which all have the same fence. For a layerwise op, stages are added as
// long as the pass is small or one kernel can copy all of it. For any other op, all stages with this fence
// are added.
void ItemMove::begin_pass(int64_t layers_bytes) {
  first_of_pass_ = last_of_pass_ = stage_;
  page_ = 0;
  counts_stages_ = may_count_stages();
  const int32_t lo = item_->layers_of(stage_).first;
  const auto bytes_to = [&](int32_t stage) {
    return view_.layer_bytes(lo, item_->layers_of(stage).second) * static_cast<int64_t>(pages_.size());
  };
  while (last_of_pass_ < item_->last_stage()) {
    const int32_t next = last_of_pass_ + 1;
    if (counts_stages_) {
      if (bytes_to(next) > layers_bytes || next - stage_ == kMostStages) break;
      if (!has_short_runs_only(next)) break;
    } else if (item_->layerwise() && bytes_to(last_of_pass_) >= kLeastRangeBytes) {
      break;
    }
    if (item_->fence_of(next) != item_->fence_of(stage_)) break;
    last_of_pass_ = next;
  }
  // If a kernel has only one stage or little work, it ends at about the time at which it would count its
  // first stage. So it does not have to count stages.
  if (last_of_pass_ == stage_ || bytes_to(last_of_pass_) < kLeastRangeBytes) counts_stages_ = false;
}

int64_t ItemMove::most_bytes(bool registered) const {
  const bool checked = direction_ == Direction::kToDevice && view_.has_digests();
  if (checked || !has_short_runs_ || !registered) return kPartBytes;
  const bool first_of_op = item_->positions().front() == 0;
  return first_ && first_of_op ? kFirstLaunchBytes : kLaunchBytes;
}

// Returns the next part, whose `pages` and `runs` are still empty. Then moves the cursor past this part.
std::shared_ptr<Part> ItemMove::cut() {
  auto part = std::make_shared<Part>();
  part->registered = view_.pool().registered(item_->page(page_).slot);
  const int64_t most = counts_stages_ ? INT64_MAX : most_bytes(part->registered);
  const auto bytes_to = [&](int32_t stage) {
    return view_.layer_bytes(item_->layers_of(stage_).first, item_->layers_of(stage).second);
  };
  part->first_stage = stage_;
  part->last_stage = last_of_pass_;
  // A page that is larger than `most` bytes is copied in ranges of its layers.
  while (part->last_stage > stage_ && bytes_to(part->last_stage) > most) --part->last_stage;
  size_t count = 1;
  if (part->last_stage == last_of_pass_ && stage_ == first_of_pass_) {
    const int64_t fit = most / std::max<int64_t>(1, bytes_to(last_of_pass_));
    count = std::min(static_cast<size_t>(std::max<int64_t>(1, fit)), kLaunchPages);
  }
  const bool whole_pass = part->last_stage == last_of_pass_;
  for (; page_ < pages_.size() && part->indices.size() < count; ++page_) {
    if (!may_move(page_)) continue;
    // Either all pages of a part are registered or none is: because of one page that the kernel cannot
    // access, the copy engine would have to copy all pages of the part.
    if (view_.pool().registered(item_->page(page_).slot) != part->registered) break;
    part->indices.push_back(page_);
    if (!whole_pass) break;  // the next part has more layers of this page
  }
  first_ = false;
  stage_ = whole_pass ? first_of_pass_ : part->last_stage + 1;
  skip_bad_pages();
  part->last_of_stages = page_ == pages_.size();
  return part;
}

// Moves the cursor to the next page that may still be copied, or past the last page of the pass.
void ItemMove::skip_bad_pages() {
  for (; page_ < pages_.size() && !may_move(page_); ++page_) stage_ = first_of_pass_;
  if (page_ == pages_.size()) stage_ = last_of_pass_ + 1;
}

const std::shared_ptr<Part>& ItemMove::part(DigestCrew& digests, int64_t layers_bytes) {
  if (!now_ && !over_) skip_bad_pages();
  if (now_ || over_ || !has_next()) return now_;
  if (stage_ > last_of_pass_) {
    begin_pass(layers_bytes);
    skip_bad_pages();
  }
  const std::shared_ptr<Part> part = cut();
  const int32_t lo = item_->layers_of(part->first_stage).first;
  const int32_t hi = item_->layers_of(part->last_stage).second;
  if (direction_ == Direction::kToDevice && view_.has_digests()) {
    std::vector<int32_t> slots;
    for (const size_t index : part->indices) slots.push_back(item_->page(index).slot);
    std::vector<MoveResult> results(slots.size());
    digests.check(view_, slots, lo, hi, results);
    std::vector<size_t> right;
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].status == Status::kOk) {
        right.push_back(part->indices[i]);
      } else {
        spoil(part->indices[i], results[i]);
        finish_if_over(part->indices[i]);
      }
    }
    part->indices = std::move(right);
  }
  part->pages.reserve(part->indices.size());
  for (const size_t index : part->indices) {
    const PageMove page = item_->page(index);
    part->pages.push_back({page.block, view_.stripe(page.slot), view_.pool().pieces().piece_of(page.slot)});
    ++pages_[index].in_flight;
  }
  if (counts_stages_) {
    for (int32_t stage = part->first_stage; stage <= part->last_stage; ++stage) {
      const auto layers = item_->layers_of(stage);
      const auto segments = view_.segments(layers.first, layers.second);
      part->runs.by_kernel.insert(part->runs.by_kernel.end(), segments.begin(), segments.end());
      part->stage_runs.push_back(part->runs.by_kernel.size());
    }
  } else {
    part->runs = split_runs(view_.segments(lo, hi), part->registered ? kernel_below_ : 0);
  }
  return now_ = part;
}

// Marks a page as failed with the result `why`. The page ends when none of its copies is in flight any more.
void ItemMove::spoil(size_t index, const MoveResult& why) {
  Page& page = pages_[index];
  page.bad = std::make_unique<MoveResult>(why);
  --good_;
  if (page.in_flight > 0) ++refused_in_flight_;
}

void ItemMove::stop(const MoveResult& why) {
  if (over_) return;
  over_ = why;
  // A part that is not completely enqueued counts as not copied.
  if (const std::shared_ptr<Part> part = std::exchange(now_, nullptr)) {
    part->bad = why;
    part->enqueued = true;
    if (part->portions == 0) end(*part);
  }
  for (size_t index = 0; index < pages_.size(); ++index) finish_if_over(index);
}

void ItemMove::finish_if_over(size_t index) {
  Page& page = pages_[index];
  if (page.finished || page.in_flight > 0) return;
  if (over_ && !page.bad && !page.through) spoil(index, *over_);
  if (!page.bad && !page.through) return;
  if (!page.bad) --good_;
  page.finished = true;
  --unfinished_;
  ended_.indices.push_back(index);
  ended_.results.push_back(page.bad ? *page.bad : MoveResult{});
}

void ItemMove::end(const Part& part) {
  for (const size_t index : part.indices) {
    Page& page = pages_[index];
    const bool was_refused = page.bad != nullptr;
    if (--page.in_flight == 0 && was_refused) --refused_in_flight_;
    if (part.bad.status != Status::kOk && !page.bad) spoil(index, part.bad);
    page.through = !page.bad && part.last_stage == item_->last_stage();
    finish_if_over(index);
  }
}

ItemMove::Ended ItemMove::take_ended() { return std::exchange(ended_, {}); }

}  // namespace flexkv::cuda
