#include "transfer/digest_job.h"

#include <algorithm>
#include <numeric>

#include "base/digest.h"
#include "transfer/run_digests.h"

namespace flexkv {
namespace {

constexpr uint64_t kNone = UINT64_MAX;
// When a run is cut into parts, each part must consist of complete leaves of the digest.
static_assert(kDigestShareBytes % kLeafBytes == 0);

}  // namespace

void DigestJob::plan(DigestWork work, const AttachedView& view, std::span<const int32_t> slots, int32_t lo,
                     int32_t hi) {
  work_ = work;
  view_ = &view;
  slots_ = slots;
  shares_ = 0;
  runs_.clear();
  portions_.clear();
  for (int32_t layer = lo; layer < hi; ++layer) {
    runs_.insert(runs_.end(), view.runs_of(layer).begin(), view.runs_of(layer).end());
  }
  // A run is cut into parts only if it is at least as long as two shares. The remainder at the run's end is
  // added to the last portion, so that no portion is small.
  const auto is_cut = [&](size_t at) { return bytes_of(at) >= 2 * kDigestShareBytes; };
  int64_t page_bytes = 0;
  for (size_t at = 0; at < runs_.size();) {
    Portion portion{at, at + 1, 0, 0};
    int64_t bytes = bytes_of(at);
    if (is_cut(at)) {
      while (portion.offset < bytes) {
        const int64_t left = bytes - portion.offset;
        portion.bytes = left < 2 * kDigestShareBytes ? left : kDigestShareBytes;
        portions_.push_back(portion);
        portion.offset += portion.bytes;
      }
    } else {
      while (portion.end < runs_.size() && bytes < kDigestShareBytes && !is_cut(portion.end)) {
        bytes += bytes_of(portion.end++);
      }
      portions_.push_back(portion);
    }
    page_bytes += bytes;
    at = portion.end;
  }
  found_.resize(slots.size() * portions_.size());
  // If pages are small, several of them make up one share.
  share_portions_ = 1;
  if (portions_.size() == 1 && page_bytes < kDigestShareBytes) {
    share_portions_ = static_cast<size_t>(kDigestShareBytes / std::max<int64_t>(page_bytes, 1));
  }
  shares_ = found_.size() / share_portions_ + (found_.size() % share_portions_ != 0 ? 1 : 0);
}

void DigestJob::digest(size_t share) noexcept {
  const size_t end = std::min(found_.size(), (share + 1) * share_portions_);
  for (size_t at = share * share_portions_; at < end; ++at) {
    found_[at] = found_in(slots_[at / portions_.size()], portions_[at % portions_.size()]);
  }
}

uint64_t DigestJob::found_in(int32_t slot, const Portion& portion) const noexcept {
  const std::byte* stripe = view_->stripe(slot);
  uint64_t* digests = view_->digests(slot);
  if (portion.bytes > 0) {
    const Segment& run = view_->view().runs()[runs_[portion.first]];
    return run_terms(stripe + run.page_offset + portion.offset, static_cast<size_t>(portion.bytes),
                     static_cast<uint64_t>(portion.offset / kLeafBytes));
  }
  for (size_t at = portion.first; at < portion.end; ++at) {
    const Segment& run = view_->view().runs()[runs_[at]];
    const uint64_t digest = run_digest(stripe + run.page_offset, static_cast<size_t>(run.run_bytes));
    uint64_t& kept = digests[runs_[at]];
    if (work_ == DigestWork::kWrite) {
      kept = digest;
    } else if (kept != digest) {
      return at;
    }
  }
  return kNone;
}

void DigestJob::finish(std::span<MoveResult> results) const {
  for (size_t page = 0; page < slots_.size(); ++page) {
    MoveResult result = finish_page(slots_[page], found_.data() + page * portions_.size());
    if (work_ == DigestWork::kCheck) results[page] = std::move(result);
  }
}

// Combines the results of all portions of a page. The runs are processed in their order, so that the result
// reports the first bad run, whichever thread finished first.
MoveResult DigestJob::finish_page(int32_t slot, const uint64_t* found) const {
  for (size_t i = 0; i < portions_.size();) {
    const size_t first = portions_[i].first;
    if (portions_[i].bytes == 0) {
      const uint64_t bad = found[i++];
      if (bad != kNone) return digest_mismatch(*view_, runs_[bad], slot);
      continue;
    }
    uint64_t terms = 0;
    for (; i < portions_.size() && portions_[i].first == first; ++i) terms += found[i];
    const uint64_t digest = finish_run(terms, static_cast<uint64_t>(bytes_of(first)));
    uint64_t& kept = view_->digests(slot)[runs_[first]];
    if (work_ == DigestWork::kWrite) {
      kept = digest;
    } else if (kept != digest) {
      return digest_mismatch(*view_, runs_[first], slot);
    }
  }
  return {};
}

}  // namespace flexkv
