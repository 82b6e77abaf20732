#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "base/error.h"
#include "index/boundary_lookup.h"
#include "index_steps.h"

using namespace flexkv;

namespace {

constexpr size_t kNoLimit = SIZE_MAX;

// A request with pages in several groups. A page may be in one of two tiers, in both tiers or in no tier.
struct Request {
  std::vector<GroupRule> rules;
  uint64_t alignment;
  std::vector<std::vector<BlockKey>> chains;
  std::vector<std::shared_ptr<BlockIndex>> tiers;
  std::shared_ptr<TierLookup> lookup;
  std::vector<std::vector<bool>> present;

  Request(std::vector<GroupRule> of_groups, uint64_t aligned, uint64_t tokens)
      : rules(std::move(of_groups)), alignment(aligned) {
    const auto groups = static_cast<uint32_t>(rules.size());
    std::vector<uint32_t> slots;
    for (uint32_t group = 0; group < groups; ++group) {
      chains.push_back(keys(tokens / rules[group].block_tokens, 100 + group));
      present.emplace_back(chains.back().size(), false);
      slots.push_back(static_cast<uint32_t>(chains.back().size() + 1));
    }
    for (int tier = 0; tier < 2; ++tier) {
      tiers.push_back(std::make_shared<BlockIndex>(slots, "lru", 42));
      for (uint32_t group = 0; group < groups; ++group) tiers.back()->grow(group, slots[group]);
    }
    lookup = std::make_shared<TierLookup>(tiers, groups);
  }

  void put(uint32_t group, size_t page, size_t tier) {
    store(*tiers[tier], std::span(chains[group]).subspan(page, 1), group);
    present[group][page] = true;
  }

  // Whether tokens [start, end) can be restored. Computes this expected result page by page from the
  // definition of the rules.
  bool restores(uint64_t start, uint64_t end) const {
    for (size_t group = 0; group < rules.size(); ++group) {
      for (size_t page = rules[group].first_page(start, end); page < end / rules[group].block_tokens;
           ++page) {
        if (!present[group][page]) return false;
      }
    }
    return true;
  }

  uint64_t longest(uint64_t start, uint64_t tokens) const {
    for (uint64_t end = tokens / alignment * alignment; end > start; end -= alignment) {
      if (restores(start, end)) return end;
      if (end < alignment) break;
    }
    return 0;
  }

  FoundLengths look(BoundaryLookup& boundaries, uint64_t start, size_t most = 1) {
    std::vector<std::span<const BlockKey>> offered;
    for (size_t group = 0; group < rules.size(); ++group) {
      offered.push_back(std::span(chains[group]).subspan(start / rules[group].block_tokens));
    }
    FoundLengths found;
    boundaries.look(offered, start, {kNoLimit, 3, 0, true}, most, found);
    return found;
  }

  void check_leases(const FoundLengths* found) const {
    for (size_t tier = 0; tier < tiers.size(); ++tier) {
      std::vector<EntryId> leased;
      for (size_t group = 0; found != nullptr && group < rules.size(); ++group) {
        for (const FoundRun& run : found->groups[group].runs) {
          const auto entries = found->groups[group].entries_of(run);
          if (run.tier == static_cast<int32_t>(tier))
            leased.insert(leased.end(), entries.begin(), entries.end());
        }
      }
      tiers[tier]->check_integrity(leased);
    }
  }
};

GroupRule random_rule(std::mt19937& random, uint32_t block_tokens) {
  const auto kind = static_cast<RuleKind>(random() % 4);
  if (kind == RuleKind::kWindow) return {kind, block_tokens, static_cast<uint32_t>(1 + random() % 6)};
  if (kind == RuleKind::kChunk) {
    return {kind, block_tokens, static_cast<uint32_t>(1 + random() % (6 * block_tokens))};
  }
  return {kind, block_tokens};
}

}  // namespace

TEST_CASE("the longest hit of random groups is what trying every length finds") {
  std::mt19937 random(7);
  for (int round = 0; round < 150; ++round) {
    CAPTURE(round);
    std::vector<GroupRule> rules;
    for (size_t groups = 1 + random() % 5; rules.size() < groups;) {
      rules.push_back(random_rule(random, random() % 2 == 0 ? 16 : 32));
    }
    const uint64_t tokens = 32 * (random() % 40);
    Request request(rules, 32, tokens);
    const uint32_t lacks = random() % 12;
    for (uint32_t group = 0; group < rules.size(); ++group) {
      for (size_t page = 0; page < request.chains[group].size(); ++page) {
        if (random() % 40 >= lacks) request.put(group, page, random() % 2);
      }
    }
    BoundaryLookup boundaries(request.lookup, rules, 32);
    for (const uint64_t start : {uint64_t{0}, 32 * (random() % (tokens / 32 + 1))}) {
      FoundLengths found = request.look(boundaries, start, 4);
      CHECK((found.lengths.empty() ? 0 : found.lengths.front()) == request.longest(start, tokens));
      for (const uint64_t length : found.lengths) CHECK(request.restores(start, length));
      request.check_leases(&found);
      if (!found.lengths.empty()) boundaries.keep(found, found.lengths.back());
      request.check_leases(&found);
      boundaries.release(found);
      request.check_leases(nullptr);
    }
  }
}

TEST_CASE("a lease too many refuses the lookup of lengths, and none is left behind") {
  Request request({{RuleKind::kFull, 16}, {RuleKind::kWindow, 16, 4}}, 16, 16 * 10);
  for (uint32_t group = 0; group < 2; ++group) {
    for (size_t page = 0; page < 10; ++page) request.put(group, page, 0);
  }
  EntryId last = kNoEntry;
  request.tiers[0]->find(1, std::span(request.chains[1]).last(1), true, &last);
  const std::vector<EntryId> often(1 << 20, last);
  std::vector<int32_t> slots(often.size());
  for (uint32_t left = Entry::kMaxPins; left > 0;) {
    const size_t more = std::min<size_t>(often.size(), left);
    request.tiers[0]->pin(std::span(often).first(more), slots.data());
    left -= static_cast<uint32_t>(more);
  }
  BoundaryLookup boundaries(request.lookup, request.rules, 16);
  CHECK_THROWS_AS(request.look(boundaries, 0), ContractError);
  std::vector<EntryId> first(10);
  request.tiers[0]->find(0, request.chains[0], true, first.data());
  for (const EntryId entry : first) {
    uint32_t pins = 1;
    request.tiers[0]->copy_pins({&entry, 1}, &pins);
    CHECK(pins == 0);
  }
}

TEST_CASE("a lookup that finds nothing for long gives up") {
  const size_t blocks = BoundaryLookup::kMaxProbes + 100;
  Request request({{RuleKind::kState, 1}}, 1, blocks);
  request.put(0, 10, 0);
  BoundaryLookup boundaries(request.lookup, request.rules, 1);
  FoundLengths found = request.look(boundaries, 0);
  CHECK(found.lengths.empty());
  request.check_leases(nullptr);
  request.put(0, blocks - BoundaryLookup::kMaxProbes + 10, 0);
  found = request.look(boundaries, 0);
  REQUIRE(found.lengths.size() == 1);
  CHECK(found.lengths[0] == blocks - BoundaryLookup::kMaxProbes + 11);
  boundaries.release(found);
}
