// The work of digesting some pages' stripes, cut into shares that threads may take in any order. It has
// neither threads nor locks; those are in digest_crew.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transfer/page_mover.h"

namespace flexkv {

// Unit: bytes. About the size of a share, which takes some 20 us to digest: long enough that taking a lock
// twice costs little in comparison, and short enough that a few MiB keep several threads busy to the end.
inline constexpr int64_t kDigestShareBytes = int64_t{256} << 10;

enum class DigestWork { kCheck, kWrite };

// One object serves many jobs, so that the memory of its plan is allocated once.
class DigestJob {
 public:
  // Cuts up layers [lo, hi) of the page in each of `slots`, which must live until finish() has returned.
  // Precondition: view.has_digests(). Throws std::bad_alloc.
  void plan(DigestWork work, const AttachedView& view, std::span<const int32_t> slots, int32_t lo,
            int32_t hi);
  DigestWork work() const { return work_; }
  size_t shares() const { return shares_; }
  // Several threads may call this at once, each with a different share.
  void digest(size_t share) noexcept;
  // Call after the last share. For a check, writes check_digests()'s result for each slot. For a write,
  // completes the digests; `results` is then empty.
  void finish(std::span<MoveResult> results) const;

 private:
  // Whole runs, or `bytes` of a long one. All pages are cut alike.
  struct Portion {
    size_t first = 0;  // into runs_
    size_t end = 0;
    int64_t offset = 0;
    int64_t bytes = 0;  // 0: whole runs
  };

  int64_t bytes_of(size_t at) const { return view_->view().runs()[runs_[at]].run_bytes; }
  // The result for one portion: if it consists of whole runs, the first bad one or kNone; if it is a part of
  // a run, the sum of its terms.
  uint64_t found_in(int32_t slot, const Portion& portion) const noexcept;
  MoveResult finish_page(int32_t slot, const uint64_t* found) const;

  DigestWork work_ = DigestWork::kCheck;
  const AttachedView* view_ = nullptr;
  std::span<const int32_t> slots_;
  std::vector<size_t> runs_;  // numbers of the runs of layers [lo, hi), in the order of the check
  std::vector<Portion> portions_;
  std::vector<uint64_t> found_;  // for the first page's portions, then for the next page's, ...
  size_t share_portions_ = 1;    // entries of found_ per share
  size_t shares_ = 0;
};

}  // namespace flexkv
