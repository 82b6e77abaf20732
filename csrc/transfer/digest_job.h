// The work of computing or checking the digests of some pages' stripes. The work is cut into shares, which
// threads may take and process in any order. The threads and locks are in digest_crew.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transfer/page_mover.h"

namespace flexkv {

// Unit: bytes. The approximate size of a share. The digests of one share take about 20 us to compute. A share
// is large enough that the two lock operations per share cost little in comparison. A share is small enough
// that a job of a few MiB keeps several threads busy until it ends.
inline constexpr int64_t kDigestShareBytes = int64_t{256} << 10;

enum class DigestWork { kCheck, kWrite };

// One job at a time: the plan of its shares, the work on a share, and the job's results. An object is used
// for many jobs, one after another, so that its memory is reused.
class DigestJob {
 public:
  // Begins a job: divides layers [lo, hi) of the page in each of `slots` into shares. `view` and `slots` must
  // stay valid until finish() has returned. Precondition: view.has_digests(). Throws std::bad_alloc.
  void plan(DigestWork work, const AttachedView& view, std::span<const int32_t> slots, int32_t lo,
            int32_t hi);
  DigestWork work() const { return work_; }
  size_t shares() const { return shares_; }
  // Does the work of one share. Several threads may call this at once, each with a different share.
  void digest(size_t share) noexcept;
  // Finishes the job after all shares have been processed. For a check, writes one result per slot to
  // `results`, as check_digests() would return it. For a write, writes the digests of long runs, which were
  // cut into several portions; `results` must then be empty.
  void finish(std::span<MoveResult> results) const;

 private:
  // A portion of a page: complete runs, or a part of a long run. All pages have the same portions.
  struct Portion {
    size_t first = 0;    // index in runs_ of the portion's first run
    size_t end = 0;      // index in runs_ after the portion's last run
    int64_t offset = 0;  // first byte of the part, relative to the run's start; 0 for complete runs
    int64_t bytes = 0;   // length of the part; 0 for complete runs
  };

  int64_t bytes_of(size_t at) const { return view_->view().runs()[runs_[at]].run_bytes; }
  // Processes one portion. If the portion consists of complete runs, returns the index in runs_ of the first
  // run whose digest does not match, or kNone. If the portion is a part of a run, returns the sum of the
  // digest's terms for that part.
  uint64_t found_in(int32_t slot, const Portion& portion) const noexcept;
  MoveResult finish_page(int32_t slot, const uint64_t* found) const;

  DigestWork work_ = DigestWork::kCheck;
  const AttachedView* view_ = nullptr;
  std::span<const int32_t> slots_;
  // Indices in view.runs() of the runs of layers [lo, hi), in the order of check_digests().
  std::vector<size_t> runs_;
  std::vector<Portion> portions_;  // the portions of each page
  std::vector<uint64_t> found_;  // one entry per portion of each page, page by page: what found_in() returned
  size_t share_portions_ = 1;    // number of portions per share
  size_t shares_ = 0;            // number of shares
};

}  // namespace flexkv
