// Looks up, over all tiers, a request whose groups need different pages. Finds the longest hits that every
// group can restore by its own rule, and leases only pages that one of these hits needs.
// A hit of N tokens can be used if every group has the pages that its rule requires at N. A lookup walks full
// groups from the start, and the shortest of them limits N; it probes the others backwards from there, since
// a window that lacks a page rules out every N whose window holds that page.
//
// Not thread-safe, like the indexes.
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

// The most hit lengths that one lookup returns: enough for an engine that cannot restore the longest one.
inline constexpr int64_t kMostLengths = 64;

class BoundaryLookup {
 public:
  // After this many probes for pages of groups that are not full, a lookup stops: it finds no further length.
  static constexpr size_t kMaxProbes = 16384;

  // `rules`: one for each group of `tiers`. A hit is a multiple of `alignment` tokens, which is a multiple of
  // every group's block. Throws ConfigError.
  BoundaryLookup(std::shared_ptr<TierLookup> tiers, std::vector<GroupRule> rules, uint64_t alignment);

  size_t groups() const { return rules_.size(); }
  uint64_t alignment() const { return alignment_; }
  const GroupRule& rule(size_t group) const { return rules_[group]; }

  // Finds the `most` longest hits of more than `start` tokens, and leases the pages that any of them needs.
  //
  // `keys`: per group, the keys of its pages after `start`. `terms.room_pages` limits the pages of the
  // longest hit. A host page that is being stored is a miss. Throws ContractError if `start` is not a
  // multiple of every group's block; then nothing is leased.
  void look(std::span<const std::span<const BlockKey>> keys, uint64_t start, const LookupTerms& terms,
            size_t most, FoundLengths& found);

  // Ends the leases on all pages that a hit of `tokens`, one of the lengths found, does not need. Throws
  // ContractError.
  void keep(FoundLengths& found, uint64_t tokens);

  void release(FoundLengths& found);

 private:
  // The longest hit that the number of keys and the room allow. Sets `cut` if the room is the limit.
  uint64_t longest(std::span<const std::span<const BlockKey>> keys, uint64_t start, size_t room_pages,
                   bool& cut) const;

  std::shared_ptr<TierLookup> tiers_;
  std::vector<GroupRule> rules_;
  uint64_t alignment_;
  std::vector<ProbedPages> pages_;  // of the lookup under way
};

}  // namespace flexkv
