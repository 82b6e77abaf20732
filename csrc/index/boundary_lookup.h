// One lookup over all tiers for a request of several groups that need other pages each: the longest hits that
// all of them can restore, by the rule of each. What no hit needs is not leased.
//
// A hit of N tokens is of use where every group has the pages that its rule asks for at N. Full groups are
// walked from the start, and the shortest of them bounds N; the others are probed backwards from there, since
// a window that lacks a page rules out every N whose window holds that page.
//
// Not thread-safe, as the indexes are not.
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

// Of one lookup: enough for an engine that restores another length than the longest.
inline constexpr int64_t kMostLengths = 64;

class BoundaryLookup {
 public:
  // After so many pages were looked for beyond those of full groups, a lookup gives up: nothing is found.
  static constexpr size_t kMaxProbes = 16384;

  // `rules`: of each group of `tiers`. A hit is a multiple of `alignment` tokens, which is one of every
  // group's blocks. Throws ConfigError.
  BoundaryLookup(std::shared_ptr<TierLookup> tiers, std::vector<GroupRule> rules, uint64_t alignment);

  size_t groups() const { return rules_.size(); }
  uint64_t alignment() const { return alignment_; }
  const GroupRule& rule(size_t group) const { return rules_[group]; }

  // Finds the `most` longest hits of more than `start` tokens, and leases what any of them needs.
  //
  // `keys`: per group, of its pages after `start`. `terms.room_pages` bounds what the longest hit needs. A
  // host page that is being stored is a miss. Throws ContractError where `start` is no multiple of a group's
  // block; then nothing is leased.
  void look(std::span<const std::span<const BlockKey>> keys, uint64_t start, const LookupTerms& terms,
            size_t most, FoundLengths& found);

  // Ends the leases on all that a hit of `tokens`, one of the lengths, does not need. Throws ContractError.
  void keep(FoundLengths& found, uint64_t tokens);

  void release(FoundLengths& found);

 private:
  // The longest hit that so many keys and so much room allow; `cut` where it is the room.
  uint64_t longest(std::span<const std::span<const BlockKey>> keys, uint64_t start, size_t room_pages,
                   bool& cut) const;

  std::shared_ptr<TierLookup> tiers_;
  std::vector<GroupRule> rules_;
  uint64_t alignment_;
  std::vector<ProbedPages> pages_;  // of the lookup under way
};

}  // namespace flexkv
