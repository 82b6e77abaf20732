#include "index/boundary_lookup.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"
#include "index/boundary_search.h"

namespace flexkv {

BoundaryLookup::BoundaryLookup(std::shared_ptr<TierLookup> tiers, std::vector<GroupRule> rules,
                               uint64_t alignment)
    : tiers_(std::move(tiers)), rules_(std::move(rules)), alignment_(alignment), pages_(rules_.size()) {
  if (rules_.size() != tiers_->groups()) {
    throw ConfigError(std::to_string(rules_.size()) + " rules; the lookup has " +
                      std::to_string(tiers_->groups()) + " groups");
  }
  if (alignment_ == 0) throw ConfigError("hits aligned to 0 tokens; allowed are 1 and more");
  for (size_t group = 0; group < rules_.size(); ++group) {
    rules_[group].check();
    if (alignment_ % rules_[group].block_tokens == 0) continue;
    throw ConfigError("hits aligned to " + std::to_string(alignment_) + " tokens, and blocks of " +
                      std::to_string(rules_[group].block_tokens) + " in group " + std::to_string(group) +
                      "; allowed are multiples of every group's block");
  }
}

uint64_t BoundaryLookup::longest(std::span<const std::span<const BlockKey>> keys, uint64_t start,
                                 size_t room_pages, bool& cut) const {
  uint64_t offered = std::numeric_limits<uint64_t>::max();
  for (size_t group = 0; group < rules_.size(); ++group) {
    offered = std::min(offered, start + keys[group].size() * rules_[group].block_tokens);
  }
  const auto needs = [&](uint64_t tokens) {
    size_t pages = 0;
    for (const GroupRule& rule : rules_) pages += rule.most_pages(start, tokens);
    return pages;
  };
  // A longer hit never needs fewer pages, so bisection finds the longest hit that needs at most `room_pages`
  // pages.
  uint64_t fits = start / alignment_;
  uint64_t end = offered / alignment_ + 1;
  while (end - fits > 1) {
    const uint64_t middle = fits + (end - fits) / 2;
    (needs(middle * alignment_) <= room_pages ? fits : end) = middle;
  }
  cut = fits < offered / alignment_;
  return std::max(fits * alignment_, start);
}

void BoundaryLookup::look(std::span<const std::span<const BlockKey>> keys, uint64_t start,
                          const LookupTerms& terms, size_t most, FoundLengths& found) {
  tiers_->check(keys, terms);
  for (size_t group = 0; group < rules_.size(); ++group) {
    if (start % rules_[group].block_tokens == 0) continue;
    throw ContractError("look from token " + std::to_string(start) + " on; group " + std::to_string(group) +
                        " has blocks of " + std::to_string(rules_[group].block_tokens));
  }
  found.lookup = tiers_->number();
  found.groups.resize(rules_.size());
  bool cut = false;
  const uint64_t allowed = longest(keys, start, terms.room_pages, cut);
  BoundarySearch search(*tiers_, rules_, alignment_, keys, start, terms, pages_);
  try {
    search.find(allowed, most, found);
  } catch (...) {
    for (FoundGroup& group : found.groups) tiers_->take_back(group, 0);
    found.lease = FoundLease::kReleased;
    throw;
  }
  found.cut = cut && !found.lengths.empty() && found.lengths.front() == allowed;
}

void BoundaryLookup::keep(FoundLengths& found, uint64_t tokens) {
  tiers_->check_made_here(found);
  found.check_held("keep");
  if (std::find(found.lengths.begin(), found.lengths.end(), tokens) == found.lengths.end()) {
    throw ContractError("keep " + std::to_string(tokens) + " tokens, which is none of the " +
                        std::to_string(found.lengths.size()) + " lengths that were found");
  }
  std::string wrong;
  for (size_t group = 0; group < rules_.size(); ++group) {
    const GroupRule& rule = rules_[group];
    const size_t had = found.start / rule.block_tokens;
    const std::string of_group = tiers_->unpin_all_but(
        found.groups[group], rule.first_page(found.start, tokens) - had, tokens / rule.block_tokens - had);
    if (!of_group.empty()) wrong = of_group;
  }
  found.lengths = {tokens};
  found.ready = found.all_in_host();
  if (!wrong.empty()) throw ContractError("keep: " + wrong);
}

void BoundaryLookup::release(FoundLengths& found) {
  tiers_->check_made_here(found);
  found.check_held("release");
  found.lengths.clear();
  found.ready = false;
  tiers_->release_pages(found);
}

}  // namespace flexkv
