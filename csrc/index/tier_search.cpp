// The part of TierLookup that finds the pages of one group. It searches for one run of pages after another;
// all pages of a run are in the same tier. If the tier changes too often from page to page, it probes all
// tiers in batches instead.
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "index/tier_lookup.h"

namespace flexkv {
namespace {

// At the end of every run, the lookup waits for one memory access per tier. So after kShortRunsInARow
// consecutive runs of fewer than kShortRunPages pages, the lookup probes the next keys in all tiers as a
// batch. The values were measured with a lookup of 8,192 keys in two tiers of 1M blocks each, on an EPYC. If
// the tier changes at every block, the lookup takes 1,300 us run by run, but 200 us in batches. If the tier
// changes every 64 blocks, the lookup takes 60 us run by run, but 220 us in batches.
constexpr size_t kShortRunsInARow = 8;
constexpr size_t kShortRunPages = 32;

constexpr size_t kNoTier = SIZE_MAX;

}  // namespace

struct TierLookup::Search {
  uint32_t group;
  std::span<const BlockKey> keys;
  const LookupTerms& terms;
  FoundGroup& into;
  std::vector<ExpiredPage>& expired;
  // Tier and state of the last run; kNoTier if there was no run. The run ended because the tier does not have
  // the next page in this state, so the search does not try this tier and state again for that page.
  size_t ended_tier = kNoTier;
  FoundState ended_state = FoundState::kReady;

  std::span<const BlockKey> left() const { return keys.subspan(into.pages); }

  void note_expired(size_t tier, EntryId entry) {
    expired.push_back({static_cast<int32_t>(tier), group, entry});
  }

  // Records the next `count` pages, which the caller has leased and whose entries and slots it has written.
  // Precondition: `runs` has capacity for one more run, so that no exception is thrown between a page's lease
  // and its record.
  void append(size_t tier, FoundState state, size_t count) {
    auto& runs = into.runs;
    const auto in_tier = static_cast<int32_t>(tier);
    if (!runs.empty() && runs.back().tier == in_tier && runs.back().state == state) {
      runs.back().count += static_cast<int32_t>(count);
    } else {
      runs.push_back({in_tier, state, static_cast<int32_t>(into.pages), static_cast<int32_t>(count)});
    }
    into.pages += count;
  }
};

void TierLookup::look_in_group(uint32_t group, std::span<const BlockKey> keys, const LookupTerms& terms,
                               FoundPages& found) {
  FoundGroup& into = found.groups[group];
  into.entries = std::make_unique_for_overwrite<EntryId[]>(keys.size());
  into.slots = std::make_unique_for_overwrite<int32_t[]>(keys.size());
  Search search{group, keys, terms, into, found.expired};
  size_t short_runs = 0;
  while (into.pages < keys.size()) {
    if (short_runs == kShortRunsInARow) {
      const size_t wanted = std::min(kWindow, keys.size() - into.pages);
      const size_t runs = into.runs.size();
      if (take_window(search) < wanted) break;
      // The runs in this window were long, so the next ones are probably long, too.
      if ((into.runs.size() - runs) * kShortRunPages <= wanted) short_runs = 0;
      search.ended_tier = kNoTier;
      continue;
    }
    const size_t taken = take_run(search);
    if (taken == 0) break;
    short_runs = taken < kShortRunPages ? short_runs + 1 : 0;
  }
  if (into.pages > keys.size() / 2) return;
  // The arrays have space for all keys, but few pages were found, so the code below replaces them by smaller
  // arrays.
  auto entries = std::make_unique_for_overwrite<EntryId[]>(into.pages);
  auto slots = std::make_unique_for_overwrite<int32_t[]>(into.pages);
  std::copy_n(into.entries.get(), into.pages, entries.get());
  std::copy_n(into.slots.get(), into.pages, slots.get());
  into.entries = std::move(entries);
  into.slots = std::move(slots);
}

size_t TierLookup::take_run(Search& search) {
  const LookupTerms& terms = search.terms;
  if (is_masked(terms.tiers_mask, 0)) {
    if (const size_t taken = take_run(search, 0, FoundState::kReady)) return taken;
    const Presence presence = tiers_[0]->presence(search.group, search.left()[0], terms.now_s);
    if (presence == Presence::kStoring) return 0;
    if (presence == Presence::kFilling && terms.coming) return take_run(search, 0, FoundState::kComing);
  }
  for (size_t tier = 1; tier < tiers_.size(); ++tier) {
    if (!is_masked(terms.tiers_mask, tier)) continue;
    if (const size_t taken = take_run(search, tier, FoundState::kReady)) return taken;
  }
  return 0;
}

size_t TierLookup::take_run(Search& search, size_t tier, FoundState state) {
  if (search.ended_tier == tier && search.ended_state == state) return 0;
  FoundGroup& into = search.into;
  if (into.runs.size() == into.runs.capacity()) into.runs.reserve(std::max<size_t>(4, 2 * into.runs.size()));
  const Presence wanted = state == FoundState::kReady ? Presence::kReady : Presence::kFilling;
  const PinnedRun run = tiers_[tier]->pin_run(search.group, search.left(), wanted, search.terms.now_s,
                                              into.entries.get() + into.pages, into.slots.get() + into.pages);
  if (run.count > 0) {
    search.append(tier, state, run.count);
    search.ended_tier = tier;
    search.ended_state = state;
  }
  if (run.expired != kNoEntry) search.note_expired(tier, run.expired);
  return run.count;
}

size_t TierLookup::take_window(Search& search) {
  FoundGroup& into = search.into;
  const LookupTerms& terms = search.terms;
  const auto window = search.left().first(std::min(kWindow, search.left().size()));
  into.runs.reserve(std::max(into.runs.size() + window.size(), 2 * into.runs.size()));
  EntryId* const entries = into.entries.get() + into.pages;
  std::array<uint8_t, kWindow> tier_of;
  std::array<FoundState, kWindow> state_of;
  // The numbers, in ascending order, of the keys whose pages have not been found in any tier yet. The next
  // tier is searched only for these keys.
  std::array<uint16_t, kWindow> missing;
  std::iota(missing.begin(), missing.begin() + static_cast<ptrdiff_t>(window.size()), uint16_t{0});
  size_t left = window.size();
  // The number of the key at which the prefix ends. It decreases during the search.
  size_t end = window.size();
  std::vector<std::pair<size_t, ExpiredPage>> expired;
  for (size_t tier = 0; tier < tiers_.size() && left > 0; ++tier) {
    if (!is_masked(terms.tiers_mask, tier)) continue;
    for (size_t k = 0; k < left; ++k) missing_[k] = window[missing[k]];
    tiers_[tier]->find(search.group, std::span(missing_).first(left), false, candidates_.data());
    size_t still = 0;
    for (size_t k = 0; k < left; ++k) {
      const uint16_t i = missing[k];
      const Presence presence = tiers_[tier]->presence(candidates_[k], terms.now_s);
      if (tier == 0 && presence == Presence::kStoring) {
        end = i;
        break;
      }
      const bool coming = tier == 0 && presence == Presence::kFilling && terms.coming;
      if (coming || presence == Presence::kReady) {
        tier_of[i] = static_cast<uint8_t>(tier);
        state_of[i] = coming ? FoundState::kComing : FoundState::kReady;
        entries[i] = candidates_[k];
        continue;
      }
      if (presence == Presence::kExpired) {
        expired.push_back({i, {static_cast<int32_t>(tier), search.group, candidates_[k]}});
      }
      missing[still++] = i;
    }
    left = still;
  }
  if (left > 0) end = std::min<size_t>(end, missing[0]);
  for (size_t i = 0; i < end; ++i) {
    into.slots[into.pages] = tiers_[tier_of[i]]->pin_one(entries[i]);
    search.append(tier_of[i], state_of[i], 1);
  }
  // Expired pages after the end of the prefix are not reported, because the lookup does not need them.
  for (const auto& [i, page] : expired) {
    if (i <= end) search.expired.push_back(page);
  }
  return end;
}

}  // namespace flexkv
