#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/error.h"
#include "index/tier_lookup.h"
#include "index_steps.h"

using namespace flexkv;

namespace {

constexpr size_t kAllBlocks = SIZE_MAX;

std::shared_ptr<BlockIndex> index_of(uint32_t slots, uint32_t groups = 1) {
  auto index = std::make_shared<BlockIndex>(std::vector<uint32_t>(groups, slots), "lru", 42);
  for (uint32_t group = 0; group < groups; ++group) index->grow(group, slots);
  return index;
}

Found look(TierLookup& lookup, std::span<const BlockKey> wanted, LookupTerms terms) {
  Found found;
  const std::vector<std::span<const BlockKey>> groups(lookup.groups(), wanted);
  lookup.look(groups, terms, found);
  return found;
}

// The entries that `found` leases in one tier.
std::vector<EntryId> leased_in(const Found& found, int32_t tier) {
  std::vector<EntryId> entries;
  for (const FoundGroup& group : found.groups) {
    for (const FoundRun& run : group.runs) {
      const auto of_run = group.entries_of(run);
      if (run.tier == tier) entries.insert(entries.end(), of_run.begin(), of_run.end());
    }
  }
  return entries;
}

// Leases `entry` until it has one pin less than the maximum.
void lease_to_the_brim(BlockIndex& index, EntryId entry) {
  const std::vector<EntryId> often(1 << 20, entry);
  std::vector<int32_t> slots(often.size());
  uint32_t pins = 0;
  index.copy_pins({&entry, 1}, &pins);
  while (pins < Entry::kMaxPins - 1) {
    const size_t more = std::min<size_t>(often.size(), Entry::kMaxPins - 1 - pins);
    index.pin(std::span(often).first(more), slots.data());
    pins += static_cast<uint32_t>(more);
  }
}

uint32_t pins_of(const BlockIndex& index, EntryId entry) {
  uint32_t pins = 0;
  index.copy_pins({&entry, 1}, &pins);
  return pins;
}

}  // namespace

TEST_CASE("a lookup goes on in the first tier that has the next block") {
  const auto host = index_of(64), disk = index_of(64), far = index_of(64);
  const auto chain = keys(40, 1);
  const auto part = [&](size_t first, size_t count) { return std::span(chain).subspan(first, count); };
  store(*host, part(0, 10));
  store(*disk, part(5, 15));
  store(*far, part(15, 25));
  store(*host, part(30, 5));
  TierLookup lookup({host, disk, far}, 1);
  Found found = look(lookup, chain, {kAllBlocks, 7, 0, true});
  CHECK(found.blocks == 40);
  CHECK(found.ready_blocks == 10);
  const auto& runs = found.groups[0].runs;
  REQUIRE(runs.size() == 3);
  CHECK(runs[1].tier == 1);
  CHECK(runs[1].first == 10);
  CHECK(runs[1].count == 10);
  CHECK(runs[2].tier == 2);
  CHECK(runs[2].count == 20);
  for (int32_t tier = 0; const auto& index : {host, disk, far})
    index->check_integrity(leased_in(found, tier++));
  lookup.trim(found, 12);
  for (int32_t tier = 0; const auto& index : {host, disk, far})
    index->check_integrity(leased_in(found, tier++));
  CHECK(leased_in(found, 1).size() == 2);
  lookup.release(found);
  for (const auto& index : {host, disk, far}) index->check_integrity({});

  found = look(lookup, chain, {kAllBlocks, 6, 0, true});
  CHECK(found.blocks == 0);
  found = look(lookup, part(5, 35), {kAllBlocks, 6, 0, true});
  CHECK(found.blocks == 35);
  CHECK(found.ready_blocks == 0);
}

TEST_CASE("tiers that take turns at every block are looked up in windows, across their borders") {
  const size_t blocks = 2000;
  const auto host = index_of(blocks), disk = index_of(blocks);
  const auto chain = keys(blocks, 2);
  for (size_t i = 0; i < blocks; ++i) store(i % 2 == 0 ? *host : *disk, std::span(chain).subspan(i, 1));
  TierLookup lookup({host, disk}, 1);
  Found found = look(lookup, chain, {kAllBlocks, 3, 0, true});
  CHECK(found.blocks == blocks);
  CHECK(found.ready_blocks == 1);
  const FoundGroup& group = found.groups[0];
  REQUIRE(group.runs.size() == blocks);
  std::vector<BlockKey> wanted(1);
  for (size_t i = 0; i < blocks; ++i) {
    CHECK(group.runs[i].tier == static_cast<int32_t>(i % 2));
    (i % 2 == 0 ? host : disk)
        ->copy_keys({group.entries.get() + i, 1}, reinterpret_cast<uint8_t*>(wanted.data()));
    CHECK(wanted[0] == chain[i]);
  }
  host->check_integrity(leased_in(found, 0));
  disk->check_integrity(leased_in(found, 1));
  lookup.release(found);

  // One page in the window at the end of the hit is missing. Later in the test, a store fills it.
  EntryId hole = kNoEntry;
  disk->find(0, std::span(chain).subspan(701, 1), true, &hole);
  uint8_t removed = 0;
  disk->remove({&hole, 1}, &removed);
  REQUIRE(removed == 1);
  found = look(lookup, chain, {kAllBlocks, 3, 0, true});
  CHECK(found.blocks == 701);
  lookup.release(found);
  const Inserted stored = host->insert(0, std::span(chain).subspan(701, 1), 1);
  found = look(lookup, chain, {kAllBlocks, 3, 0, true});
  CHECK(found.blocks == 701);
  lookup.release(found);
  host->check_integrity(stored.entries);
  disk->check_integrity({});
}

TEST_CASE("a lease too many refuses the lookup, and none is left behind") {
  for (const bool in_windows : {false, true}) {
    CAPTURE(in_windows);
    const auto host = index_of(64), disk = index_of(64);
    const auto chain = keys(30, 3);
    std::vector<EntryId> in_host, in_disk;
    for (size_t i = 0; i < chain.size(); ++i) {
      const bool of_host = in_windows ? i % 2 == 0 : i < 15;
      auto& entries = of_host ? in_host : in_disk;
      entries.push_back(store(of_host ? *host : *disk, std::span(chain).subspan(i, 1))[0]);
    }
    const EntryId full = in_disk.back();
    lease_to_the_brim(*disk, full);
    TierLookup lookup({host, disk}, 1);
    Found last = look(lookup, chain, {kAllBlocks, 3, 0, true});
    CHECK(last.blocks == 30);
    CHECK(pins_of(*disk, full) == Entry::kMaxPins);
    CHECK_THROWS_AS(look(lookup, chain, {kAllBlocks, 3, 0, true}), ContractError);
    host->check_integrity(leased_in(last, 0));
    CHECK(pins_of(*disk, full) == Entry::kMaxPins);
    for (size_t i = 0; i + 1 < in_disk.size(); ++i) CHECK(pins_of(*disk, in_disk[i]) == 1);
    lookup.release(last);
    host->check_integrity({});
    CHECK(pins_of(*disk, full) == Entry::kMaxPins - 1);
  }
}

TEST_CASE("what one group lacks is not leased in the others") {
  const auto host = index_of(64, 2), disk = index_of(64, 2);
  const auto chain = keys(20, 4);
  store(*host, std::span(chain).first(12), 0);
  store(*disk, std::span(chain).subspan(12), 0);
  store(*disk, std::span(chain).first(15), 1);
  TierLookup lookup({host, disk}, 2);
  Found found = look(lookup, chain, {kAllBlocks, 3, 0, true});
  CHECK(found.blocks == 15);
  CHECK(found.ready_blocks == 0);
  host->check_integrity(leased_in(found, 0));
  disk->check_integrity(leased_in(found, 1));
  CHECK(leased_in(found, 0).size() == 12);
  CHECK(leased_in(found, 1).size() == 18);
  lookup.release(found);

  found = look(lookup, chain, {9, 3, 0, true});
  CHECK(found.blocks == 4);
  CHECK(found.cut);
  found = look(lookup, chain, {30, 3, 0, true});
  CHECK(found.blocks == 15);
  CHECK_FALSE(found.cut);
}

TEST_CASE("what is being filled waits, what is being stored ends the prefix") {
  const auto host = index_of(64), disk = index_of(64);
  const auto chain = keys(9, 5);
  store(*host, std::span(chain).first(3));
  const Inserted filled = host->insert(0, std::span(chain).subspan(3, 3), 3, 71, 1);
  store(*disk, std::span(chain).subspan(4, 5));
  TierLookup lookup({host, disk}, 1);
  Found found = look(lookup, chain, {kAllBlocks, 3, 0, true});
  CHECK(found.blocks == 9);
  CHECK(found.groups[0].runs[1].state == FoundState::kComing);
  CHECK(lookup.count_ready(found) == 3);
  const std::vector<uint8_t> ok = {1, 1, 0};
  std::vector<uint8_t> published(3);
  host->finish(filled.entries, ok.data(), published.data());
  CHECK(lookup.count_ready(found) == 5);
  CHECK(pins_of(*host, filled.entries[0]) == 2);
  CHECK(pins_of(*host, filled.entries[2]) == 2);  // pinned, so its slot is not free yet
  lookup.trim(found, 5);
  CHECK(pins_of(*host, filled.entries[2]) == 1);
  lookup.release(found);
  host->unpin(filled.entries);
  host->check_integrity({});
  disk->check_integrity({});
  CHECK(host->free_slots(0) == 64 - 5);

  store(*host, std::span(chain).first(5));
  host->insert(0, std::span(chain).subspan(5, 1), 1);
  CHECK(look(lookup, chain, {kAllBlocks, 3, 0, true}).blocks == 5);
  CHECK(look(lookup, std::span(chain).subspan(5), {kAllBlocks, 2, 0, true}).blocks == 4);
}

TEST_CASE("an index without fillers and expiries has none") {
  const auto host = index_of(8);
  const auto entries = store(*host, keys(3, 6));
  std::vector<int64_t> fillers(3, 9);
  std::vector<uint64_t> expiries(3, 9);
  host->copy_fillers(entries, fillers.data());
  host->copy_expiries(entries, expiries.data());
  CHECK(fillers == std::vector<int64_t>(3));
  CHECK(expiries == std::vector<uint64_t>(3));
  host->set_expiry(entries, expiries.data());
  CHECK(host->presence(entries[0], UINT64_MAX) == Presence::kReady);
  expiries[1] = 10;
  host->set_expiry(entries, expiries.data());
  CHECK(host->presence(entries[1], 9) == Presence::kReady);
  CHECK(host->presence(entries[1], 10) == Presence::kExpired);
  host->clear();
  CHECK(host->presence(entries[1], 10) == Presence::kAbsent);
  host->check_integrity({});
}
