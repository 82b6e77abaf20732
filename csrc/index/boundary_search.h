// The state of one lookup of BoundaryLookup.
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

// What a search knows about the pages of one group that is not full. Pages are numbered from the search's
// start. The next search reuses the memory, not the contents.
struct ProbedPages {
  std::vector<uint8_t> where;    // unknown (0), absent, or a tier and a state
  std::vector<EntryId> entries;  // of the pages that were found
  // Pages [there_from, there_to) are all present: the next length need not look at them again.
  size_t there_from = 0;
  size_t there_to = 0;
  bool walked = false;

  void begin(size_t pages) {
    where.assign(pages, 0);
    if (entries.size() < pages) entries.resize(pages);
    there_from = there_to = 0;
    walked = false;
  }
};

class BoundarySearch {
 public:
  // Takes the arguments of BoundaryLookup::look, which outlive the search. `pages`: one for each group.
  BoundarySearch(TierLookup& tiers, std::span<const GroupRule> rules, uint64_t alignment,
                 std::span<const std::span<const BlockKey>> keys, uint64_t start, const LookupTerms& terms,
                 std::span<ProbedPages> pages);

  // Writes to `found` the `most` longest hits of at most `allowed` tokens, and leases the pages that they
  // need.
  void find(uint64_t allowed, size_t most, FoundLengths& found);

 private:
  size_t page_of(size_t group, uint64_t tokens) const {
    return (tokens - start_) / rules_[group].block_tokens;
  }
  uint64_t aligned(uint64_t tokens) const { return tokens / alignment_ * alignment_; }

  uint64_t walk_full(uint64_t allowed);
  // The longest hit of at most `limit` tokens; `start_` for none.
  uint64_t longest(uint64_t limit);
  // The longest that one group allows.
  uint64_t longest_of(size_t group, uint64_t limit);
  uint64_t longest_state(size_t group, uint64_t limit);
  uint64_t longest_run(size_t group, uint64_t limit);
  // Looks for the pages of a run in host memory by walking the chain from its start. Usually all of them are
  // there, and then that is faster than probing each.
  void walk_run(size_t group, size_t first, size_t end);
  // Probes pages `last`, `last - step`, ... down to `first`, skips those already known, and stops after
  // `most` probes.
  void probe(size_t group, size_t first, size_t last, size_t step, size_t most);
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
