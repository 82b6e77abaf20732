#include "index/tier_lookup.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

uint64_t next_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Removes all pages after the group's first `pages` pages from its runs.
void shorten(FoundGroup& group, size_t pages) {
  while (!group.runs.empty() && static_cast<size_t>(group.runs.back().first) >= pages) group.runs.pop_back();
  if (!group.runs.empty()) {
    FoundRun& last = group.runs.back();
    last.count = std::min(last.count, static_cast<int32_t>(pages) - last.first);
  }
  group.pages = std::min(group.pages, pages);
  group.first = std::min(group.first, pages);
}

// Calls visit(run) for each run that has pages at or after page `from`, from the last run to the first. The
// run that is passed does not include pages before `from`.
template <class Visit>
void visit_backwards(const FoundGroup& group, size_t from, Visit visit) {
  for (size_t i = group.runs.size(); i > 0; --i) {
    FoundRun run = group.runs[i - 1];
    if (static_cast<size_t>(run.end()) <= from) return;
    const int32_t first = std::max(run.first, static_cast<int32_t>(from));
    run.count = run.end() - first;
    run.first = first;
    visit(run);
  }
}

}  // namespace

TierLookup::TierLookup(std::vector<std::shared_ptr<BlockIndex>> presences, size_t groups)
    : tiers_(std::move(presences)), groups_(groups), number_(next_number()) {
  if (tiers_.empty() || tiers_.size() > kMaxTiers) {
    throw ConfigError("a lookup over " + std::to_string(tiers_.size()) + " tiers; allowed are 1 to " +
                      std::to_string(kMaxTiers));
  }
  for (size_t tier = 0; tier < tiers_.size(); ++tier) {
    if (tiers_[tier]->groups() != groups) {
      throw ContractError("the index of tier " + std::to_string(tier) + " has " +
                          std::to_string(tiers_[tier]->groups()) + " groups; the lookup has " +
                          std::to_string(groups));
    }
    const auto same = std::find(tiers_.begin(), tiers_.begin() + static_cast<ptrdiff_t>(tier), tiers_[tier]);
    if (same != tiers_.begin() + static_cast<ptrdiff_t>(tier)) {
      throw ContractError("tiers " + std::to_string(same - tiers_.begin()) + " and " + std::to_string(tier) +
                          " have the same index");
    }
  }
}

void TierLookup::check_mask(uint32_t mask) const {
  if ((uint64_t{mask} >> tiers_.size()) == 0) return;
  throw ContractError("mask " + std::to_string(mask) + " names tiers from " + std::to_string(tiers_.size()) +
                      " on; the lookup has " + std::to_string(tiers_.size()));
}

void TierLookup::check_made_here(const FoundPages& found) const {
  if (found.lookup != number_) throw ContractError("another lookup found these pages");
}

void TierLookup::check(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms) const {
  if (keys.size() != groups_) {
    throw ContractError("look: keys of " + std::to_string(keys.size()) + " groups; the lookup has " +
                        std::to_string(groups_));
  }
  check_mask(terms.tiers_mask);
}

void TierLookup::look(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms,
                      Found& found) {
  check(keys, terms);
  size_t offered = std::numeric_limits<int32_t>::max();
  for (const auto& of_group : keys) offered = std::min(offered, of_group.size());
  const size_t room = std::min(offered, terms.room_pages / groups_);
  found.lookup = number_;
  found.groups.resize(groups_);
  found.blocks = room;
  // Each page is recorded in `found` when it is leased, so that the leases can be undone after an exception.
  try {
    for (uint32_t group = 0; group < groups_ && found.blocks > 0; ++group) {
      look_in_group(group, keys[group].first(found.blocks), terms, found);
      found.blocks = found.groups[group].pages;
    }
    std::sort(found.expired.begin(), found.expired.end());
    found.expired.erase(std::unique(found.expired.begin(), found.expired.end()), found.expired.end());
    found.cut = found.blocks == room && room < offered && has_next(keys, terms, room);
  } catch (...) {
    for (FoundGroup& group : found.groups) take_back(group, 0);
    found.lease = FoundLease::kReleased;
    throw;
  }
  found.ready_blocks = found.blocks;
  for (FoundGroup& group : found.groups) {
    take_back(group, found.blocks);
    found.ready_blocks = std::min(found.ready_blocks, group.ready_pages());
  }
}

bool TierLookup::has_next(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms,
                          size_t at) const {
  for (uint32_t group = 0; group < groups_; ++group) {
    bool found = false;
    for (size_t tier = 0; tier < tiers_.size() && !found; ++tier) {
      if (!is_masked(terms.tiers_mask, tier)) continue;
      const Presence presence = tiers_[tier]->presence(group, keys[group][at], terms.now_s);
      if (tier == 0 && presence == Presence::kStoring) return false;
      found = presence == Presence::kReady || (tier == 0 && terms.coming && presence == Presence::kFilling);
    }
    if (!found) return false;
  }
  return true;
}

void TierLookup::take_back(FoundGroup& group, size_t from) {
  if (group.pages <= from) return;
  visit_backwards(group, from,
                  [&](const FoundRun& run) { tiers_[run.tier]->take_back(group.entries_of(run)); });
  shorten(group, from);
}

std::string TierLookup::unpin(FoundGroup& group, size_t from) {
  std::string wrong;
  // The loop starts with the last run, so that the pages at the start of the prefix become the most recently
  // used.
  visit_backwards(group, from, [&](const FoundRun& run) {
    try {
      tiers_[run.tier]->unpin(group.entries_of(run));
    } catch (const ContractError& error) {
      wrong = "tier " + std::to_string(run.tier) + ": " + error.what();
    }
  });
  shorten(group, from);
  return wrong;
}

std::string TierLookup::unpin_all_but(FoundGroup& group, size_t first, size_t end) {
  std::string wrong = unpin(group, end);
  const auto from = static_cast<int32_t>(first);
  std::vector<FoundRun> kept;
  for (auto run = group.runs.rbegin(); run != group.runs.rend(); ++run) {
    FoundRun before = *run;
    before.count = std::min(run->end(), from) - run->first;
    if (before.count > 0) {
      const auto entries = group.entries_of(before);
      try {
        tiers_[before.tier]->unpin(entries);
      } catch (const ContractError& error) {
        wrong = "tier " + std::to_string(before.tier) + ": " + error.what();
      }
      const size_t at = static_cast<size_t>(before.first) - group.first;
      std::fill_n(group.entries.get() + at, entries.size(), kNoEntry);
      std::fill_n(group.slots.get() + at, entries.size(), -1);
      run->first = from;
      run->count -= before.count;
    }
    if (run->count > 0) kept.push_back(*run);
  }
  group.runs.assign(kept.rbegin(), kept.rend());
  return wrong;
}

void TierLookup::trim(Found& found, size_t blocks) {
  check_made_here(found);
  found.check_held("trim");
  if (blocks > found.blocks) {
    throw BlockRangeError("trim to " + std::to_string(blocks) + " blocks; allowed are 0 to " +
                          std::to_string(found.blocks));
  }
  found.blocks = blocks;
  found.ready_blocks = std::min(found.ready_blocks, blocks);
  std::string wrong;
  for (FoundGroup& group : found.groups) {
    const std::string of_group = unpin(group, blocks);
    if (!of_group.empty()) wrong = of_group;
  }
  if (!wrong.empty()) throw ContractError("trim: " + wrong);
}

void TierLookup::release(Found& found) {
  check_made_here(found);
  found.check_held("release");
  found.blocks = found.ready_blocks = 0;
  release_pages(found);
}

void TierLookup::release_pages(FoundPages& found) {
  check_made_here(found);
  found.check_held("release");
  found.lease = FoundLease::kReleased;
  std::string wrong;
  for (FoundGroup& group : found.groups) {
    const std::string of_group = unpin(group, 0);
    if (!of_group.empty()) wrong = of_group;
  }
  if (!wrong.empty()) throw ContractError("release: " + wrong);
}

size_t TierLookup::count_ready(const Found& found) const {
  check_made_here(found);
  if (found.lease == FoundLease::kReleased)
    throw ContractError("count_ready: the pages were released before");
  size_t blocks = found.blocks;
  for (const FoundGroup& group : found.groups) {
    size_t ready = 0;
    for (const FoundRun& run : group.runs) {
      if (run.tier != 0 || ready >= blocks) break;
      const size_t of_run = tiers_[0]->count_ready(group.entries_of(run));
      ready += of_run;
      if (of_run < static_cast<size_t>(run.count)) break;
    }
    blocks = std::min(blocks, ready);
  }
  return blocks;
}

void TierLookup::present(uint32_t group, std::span<const BlockKey> keys, uint32_t tiers_mask, uint64_t now_s,
                         uint8_t* out) {
  check_mask(tiers_mask);
  std::fill_n(out, keys.size(), uint8_t{0});
  for (size_t begin = 0; begin < keys.size(); begin += kWindow) {
    const auto window = keys.subspan(begin, std::min(kWindow, keys.size() - begin));
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
      if (!is_masked(tiers_mask, tier)) continue;
      tiers_[tier]->find(group, window, false, candidates_.data());
      for (size_t i = 0; i < window.size(); ++i) {
        if (out[begin + i] != 0 || candidates_[i] == kNoEntry) continue;
        if (tiers_[tier]->presence(candidates_[i], now_s) == Presence::kReady) {
          out[begin + i] = static_cast<uint8_t>(tier + 1);
        }
      }
    }
  }
}

}  // namespace flexkv
