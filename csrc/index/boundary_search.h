// The search that BoundaryLookup makes for one lookup.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/found.h"
#include "index/group_rule.h"
#include "index/tier_lookup.h"

namespace flexkv {

// The pages that a search has probed in one group without full attention. Page 0 is the first page after the
// token at which the search starts. The next search reuses the memory of this struct, but not the contents.
struct ProbedPages {
  std::vector<uint8_t> where;    // one byte per page: unknown (0), absent (1), or a tier and a state
  std::vector<EntryId> entries;  // one entry per page; valid only for pages that were found
  // Pages [there_from, there_to) are all present, so the search for the next length skips them.
  size_t there_from = 0;
  size_t there_to = 0;
  bool walked = false;  // whether the current search has already called `walk_run`

  void begin(size_t pages) {
    where.assign(pages, 0);
    if (entries.size() < pages) entries.resize(pages);
    there_from = there_to = 0;
    walked = false;
  }
};

class BoundarySearch {
 public:
  // The arguments have the same meaning as in BoundaryLookup's constructor and in `look`. They must outlive
  // the search. `pages` has one element for each group.
  BoundarySearch(TierLookup& tiers, std::span<const GroupRule> rules, uint64_t alignment,
                 std::span<const std::span<const BlockKey>> keys, uint64_t start, const LookupTerms& terms,
                 std::span<ProbedPages> pages);

  // Finds the longest hits of at most `allowed` tokens (at most `most` hits). Writes them to `found` and
  // leases the pages that they need.
  void find(uint64_t allowed, size_t most, FoundLengths& found);

 private:
  // Returns the number of the group's pages between token `start_` and token `tokens`.
  size_t page_of(size_t group, uint64_t tokens) const {
    return (tokens - start_) / rules_[group].block_tokens;
  }
  uint64_t aligned(uint64_t tokens) const { return tokens / alignment_ * alignment_; }

  // Leases the leading pages of each group with full attention. Returns the number of leading tokens, at most
  // `allowed`, for which all these groups have pages.
  uint64_t walk_full(uint64_t allowed);
  // Returns the longest hit of at most `limit` tokens; `start_` if there is none.
  uint64_t longest(uint64_t limit);
  // The next three functions return the longest hit of at most `limit` tokens for which one group has all
  // pages that its rule requires. They return `start_` if there is none.
  uint64_t longest_of(size_t group, uint64_t limit);
  uint64_t longest_state(size_t group, uint64_t limit);
  uint64_t longest_run(size_t group, uint64_t limit);
  // Looks for pages [first, end) in host memory by following their chain. Usually all these pages are in host
  // memory; then following the chain is faster than probing each page.
  void walk_run(size_t group, size_t first, size_t end);
  // Probes pages `last`, `last - step` and so on down to `first`. Skips pages that were already probed, and
  // stops after `most` probes.
  void probe(size_t group, size_t first, size_t last, size_t step, size_t most);
  // Leases each page of the group that some length in `found` needs, and records the page in `found`.
  void lease(size_t group, FoundLengths& found);

  TierLookup& tiers_;
  std::span<const GroupRule> rules_;
  uint64_t alignment_;
  std::span<const std::span<const BlockKey>> keys_;
  uint64_t start_;
  const LookupTerms& terms_;
  std::span<ProbedPages> pages_;
  FoundLengths* found_ = nullptr;
  size_t probes_ = 0;
};

}  // namespace flexkv
