#include "index/boundary_search.h"

#include <algorithm>
#include <array>

#include "index/boundary_lookup.h"

namespace flexkv {
namespace {

// How many pages a search probes at once. Their memory accesses overlap. The first batch is small, so that a
// miss at the first page costs little. While all pages are found, the batch size doubles, up to kBatch.
constexpr size_t kFirstBatch = 16;
constexpr size_t kBatch = 64;

// One byte per page says where the page is. Its value is kUnknown if the page has not been probed, and
// kAbsent if no tier has the page. Otherwise the value is 2 x (tier + 1), plus 1 if an op is filling the
// page.
constexpr uint8_t kUnknown = 0;
constexpr uint8_t kAbsent = 1;
static_assert(2 * (TierLookup::kMaxTiers + 1) <= UINT8_MAX);

uint8_t where_in(size_t tier, bool coming) { return static_cast<uint8_t>(2 * (tier + 1) + (coming ? 1 : 0)); }
int32_t tier_of(uint8_t where) { return where / 2 - 1; }
FoundState state_of(uint8_t where) { return where % 2 == 0 ? FoundState::kReady : FoundState::kComing; }

}  // namespace

BoundarySearch::BoundarySearch(TierLookup& tiers, std::span<const GroupRule> rules, uint64_t alignment,
                               std::span<const std::span<const BlockKey>> keys, uint64_t start,
                               const LookupTerms& terms, std::span<ProbedPages> pages)
    : tiers_(tiers),
      rules_(rules),
      alignment_(alignment),
      keys_(keys),
      start_(start),
      terms_(terms),
      pages_(pages) {}

void BoundarySearch::find(uint64_t allowed, size_t most, FoundLengths& found) {
  found_ = &found;
  found.start = start_;
  const uint64_t full = aligned(walk_full(allowed));
  const auto is_full = [](const GroupRule& rule) { return rule.kind == RuleKind::kFull; };
  found.shared = std::any_of(rules_.begin(), rules_.end(), is_full) ? std::max(start_, full) : start_;
  for (size_t group = 0; group < rules_.size(); ++group) {
    if (rules_[group].kind == RuleKind::kFull || full <= start_) continue;
    pages_[group].begin(page_of(group, full));
  }
  for (uint64_t limit = full; found.lengths.size() < most && limit > start_;) {
    const uint64_t length = longest(limit);
    if (length <= start_) break;
    found.lengths.push_back(length);
    limit = length - std::min(length, alignment_);
  }
  const uint64_t end = found.lengths.empty() ? start_ : found.lengths.front();
  for (size_t group = 0; group < rules_.size(); ++group) {
    if (rules_[group].kind == RuleKind::kFull) {
      tiers_.take_back(found.groups[group], page_of(group, end));
    } else if (end > start_) {
      lease(group, found);
    }
  }
  std::sort(found.expired.begin(), found.expired.end());
  found.expired.erase(std::unique(found.expired.begin(), found.expired.end()), found.expired.end());
  found.ready = end > start_ && found.all_in_host();
}

uint64_t BoundarySearch::walk_full(uint64_t allowed) {
  for (uint32_t group = 0; group < rules_.size() && allowed > start_; ++group) {
    if (rules_[group].kind != RuleKind::kFull) continue;
    tiers_.look_in_group(group, keys_[group].first(page_of(group, allowed)), terms_, *found_);
    allowed = std::min(allowed, start_ + found_->groups[group].pages * rules_[group].block_tokens);
  }
  return allowed;
}

uint64_t BoundarySearch::longest(uint64_t limit) {
  for (bool shorter = true; shorter && limit > start_;) {
    shorter = false;
    for (size_t group = 0; group < rules_.size() && limit > start_; ++group) {
      const uint64_t of_group = longest_of(group, limit);
      shorter |= of_group < limit;
      limit = of_group;
    }
    if (probes_ > BoundaryLookup::kMaxProbes) return start_;
  }
  return limit;
}

uint64_t BoundarySearch::longest_of(size_t group, uint64_t limit) {
  switch (rules_[group].kind) {
    case RuleKind::kState:
      return longest_state(group, limit);
    case RuleKind::kWindow:
    case RuleKind::kChunk:
      return longest_run(group, limit);
    case RuleKind::kFull:
      break;
  }
  return limit;
}

uint64_t BoundarySearch::longest_state(size_t group, uint64_t limit) {
  const size_t step = alignment_ / rules_[group].block_tokens;
  const size_t first =
      page_of(group, aligned(start_) + alignment_) - 1;  // last page of the shortest possible hit
  while (limit > start_ && probes_ <= BoundaryLookup::kMaxProbes) {
    const size_t page = page_of(group, limit) - 1;
    uint8_t& where = pages_[group].where[page];
    if (where == kUnknown) probe(group, first, page, step, kFirstBatch);
    if (where > kAbsent) return limit;
    limit -= std::min(limit - start_, alignment_);
  }
  return start_;
}

uint64_t BoundarySearch::longest_run(size_t group, uint64_t limit) {
  const GroupRule& rule = rules_[group];
  ProbedPages& pages = pages_[group];
  const size_t had = start_ / rule.block_tokens;
  while (limit > start_ && probes_ <= BoundaryLookup::kMaxProbes) {
    const size_t first = rule.first_page(start_, limit) - had;
    const size_t end = page_of(group, limit);
    if (first == end) return limit;
    // The search at the previous limit found pages [there_from, there_to). If the pages that the current
    // limit needs end outside of that range, the search starts again at the end of these pages.
    if (end < pages.there_from || end > pages.there_to) pages.there_from = end;
    pages.there_to = end;
    if (!pages.walked) walk_run(group, first, end);
    size_t batch = kFirstBatch;
    while (pages.there_from > first) {
      const size_t page = pages.there_from - 1;
      if (pages.where[page] == kUnknown) {
        probe(group, first, page, 1, batch);
        batch = std::min(2 * batch, kBatch);
      }
      if (pages.where[page] == kAbsent) break;
      pages.there_from = page;
    }
    if (pages.there_from <= first) return limit;
    // Every hit that is longer than the new limit, and at most as long as the old limit, needs the absent
    // page.
    limit = aligned(start_ + (pages.there_from - 1) * rule.block_tokens);
  }
  return start_;
}

void BoundarySearch::walk_run(size_t group, size_t first, size_t end) {
  ProbedPages& pages = pages_[group];
  pages.walked = true;
  if (!tiers_.uses(terms_, 0)) return;
  const BlockIndex& host = tiers_.index_of(0);
  const auto keys = keys_[group].subspan(first, end - first);
  const size_t found = host.match_prefix(static_cast<uint32_t>(group), keys, pages.entries.data() + first);
  for (size_t page = first; page < first + found; ++page) {
    if (host.presence(pages.entries[page], terms_.now_s) != Presence::kReady) return;
    pages.where[page] = where_in(0, false);
  }
}

void BoundarySearch::probe(size_t group, size_t first, size_t last, size_t step, size_t most) {
  ProbedPages& pages = pages_[group];
  std::array<size_t, kBatch> wanted;
  size_t left = 0;
  for (size_t page = last;; page -= step) {
    if (pages.where[page] == kUnknown) wanted[left++] = page;
    if (left == most || page < first + step) break;
  }
  probes_ += left;
  for (size_t k = 0; k < left; ++k) pages.where[wanted[k]] = kAbsent;
  std::array<BlockKey, kBatch> keys;
  std::array<EntryId, kBatch> found;
  const auto number = static_cast<uint32_t>(group);
  for (size_t tier = 0; tier < tiers_.tiers() && left > 0; ++tier) {
    if (!tiers_.uses(terms_, tier)) continue;
    for (size_t k = 0; k < left; ++k) keys[k] = keys_[group][wanted[k]];
    tiers_.index_of(tier).find(number, std::span(keys).first(left), false, found.data());
    size_t still = 0;
    for (size_t k = 0; k < left; ++k) {
      const size_t page = wanted[k];
      const Presence presence = tiers_.index_of(tier).presence(found[k], terms_.now_s);
      // A page that is being stored counts as absent: it may never be published, and it cannot be fetched
      // while the store runs.
      if (tier == 0 && presence == Presence::kStoring) continue;
      const bool coming = tier == 0 && presence == Presence::kFilling && terms_.coming;
      if (coming || presence == Presence::kReady) {
        pages.where[page] = where_in(tier, coming);
        pages.entries[page] = found[k];
        continue;
      }
      if (presence == Presence::kExpired) {
        found_->expired.push_back({static_cast<int32_t>(tier), number, found[k]});
      }
      wanted[still++] = page;
    }
    left = still;
  }
}

void BoundarySearch::lease(size_t group, FoundLengths& found) {
  const GroupRule& rule = rules_[group];
  const ProbedPages& pages = pages_[group];
  FoundGroup& into = found.groups[group];
  const size_t had = start_ / rule.block_tokens;
  const size_t end = page_of(group, found.lengths.front());
  into.first = end;
  for (const uint64_t length : found.lengths) {
    into.first = std::min(into.first, rule.first_page(start_, length) - had);
  }
  into.entries = std::make_unique_for_overwrite<EntryId[]>(end - into.first);
  into.slots = std::make_unique_for_overwrite<int32_t[]>(end - into.first);
  std::fill_n(into.entries.get(), end - into.first, kNoEntry);
  std::fill_n(into.slots.get(), end - into.first, -1);
  // The loop starts with the shortest length, and leases each page once. It reserves memory for the runs
  // before it leases pages, because an exception between a lease and its record would leak the lease.
  into.pages = into.first;
  for (auto length = found.lengths.rbegin(); length != found.lengths.rend(); ++length) {
    const size_t from = std::max(into.pages, rule.first_page(start_, *length) - had);
    into.runs.reserve(into.runs.size() + page_of(group, *length) - std::min(from, page_of(group, *length)));
    for (size_t page = from; page < page_of(group, *length); ++page) {
      const int32_t tier = tier_of(pages.where[page]);
      const FoundState state = state_of(pages.where[page]);
      const auto at = static_cast<int32_t>(page);
      into.slots[page - into.first] = tiers_.index_of(static_cast<size_t>(tier)).pin_one(pages.entries[page]);
      into.entries[page - into.first] = pages.entries[page];
      const bool follows = !into.runs.empty() && into.runs.back().tier == tier &&
                           into.runs.back().state == state && into.runs.back().end() == at;
      if (follows) {
        ++into.runs.back().count;
      } else {
        into.runs.push_back({tier, state, at, 1});
      }
      into.pages = page + 1;
    }
  }
}

}  // namespace flexkv
