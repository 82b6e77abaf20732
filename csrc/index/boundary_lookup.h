// A lookup over all tiers for models whose KV groups need different pages. A rule says which pages a hit
// needs in one group. The lookup finds the longest hits for which every group has the pages that its rule
// requires. It leases only the pages that these hits need.
//
// To find a hit of N tokens, the lookup first searches the groups with full attention from the start. The
// shortest prefix that it finds limits N. From that N on, it probes the groups with other rules backwards: if
// a page of a window is absent, no N whose window contains that page is possible.
//
// Like the indexes, this class is not thread-safe.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/boundary_search.h"
#include "index/found.h"
#include "index/group_rule.h"
#include "index/tier_lookup.h"

namespace flexkv {

// The maximum number of hit lengths that one lookup returns. An inference engine that cannot restore the
// longest hit uses a shorter one.
inline constexpr int64_t kMostLengths = 64;

class BoundaryLookup {
 public:
  // The maximum number of probes for pages of groups without full attention. A lookup that exceeds this
  // number stops and returns the lengths that it has found so far.
  static constexpr size_t kMaxProbes = 16384;

  // `rules` has one rule for each group of `tiers`. `alignment`: every hit length is a multiple of this many
  // tokens. `alignment` must itself be a multiple of every group's block length. Throws ConfigError if the
  // rules or the alignment are invalid.
  BoundaryLookup(std::shared_ptr<TierLookup> tiers, std::vector<GroupRule> rules, uint64_t alignment);

  size_t groups() const { return rules_.size(); }
  uint64_t alignment() const { return alignment_; }
  const GroupRule& rule(size_t group) const { return rules_[group]; }

  // Finds the longest hits of more than `start` tokens (at most `most` hits), and leases the pages that these
  // hits need. Writes the result to `found`.
  //
  // `keys` has, for each group, the keys of its pages after `start`. `terms.room_pages` limits the number of
  // pages of the longest hit. A page in host memory that is still being stored is a miss. Throws
  // ContractError, and leases nothing, if `start` is not a multiple of every group's block length.
  void look(std::span<const std::span<const BlockKey>> keys, uint64_t start, const LookupTerms& terms,
            size_t most, FoundLengths& found);

  // Chooses `tokens`, one of the lengths in `found`, and ends the leases on all pages that a hit of this
  // length does not need. Throws ContractError if the length is not in `found`, or if a lease had already
  // ended.
  void keep(FoundLengths& found, uint64_t tokens);

  void release(FoundLengths& found);

 private:
  // Returns the longest hit, in tokens, that the number of keys and `room_pages` allow. Sets `cut` to whether
  // `room_pages` is the limit.
  uint64_t longest(std::span<const std::span<const BlockKey>> keys, uint64_t start, size_t room_pages,
                   bool& cut) const;

  std::shared_ptr<TierLookup> tiers_;
  std::vector<GroupRule> rules_;
  uint64_t alignment_;
  std::vector<ProbedPages> pages_;  // for each group, the pages probed in the current lookup
};

}  // namespace flexkv
