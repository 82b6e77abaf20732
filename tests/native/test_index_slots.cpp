#include <doctest/doctest.h>

#include <vector>

#include "base/error.h"
#include "index/block_index.h"
#include "index_steps.h"

using namespace flexkv;

namespace {

std::vector<int32_t> slots(const BlockIndex& index, std::span<const EntryId> entries) {
  std::vector<int32_t> found(entries.size());
  index.copy_slots(entries, found.data());
  return found;
}

}  // namespace

TEST_CASE("blocks from before are found in their slots, the oldest leave first") {
  BlockIndex index({8}, "lru", 42);
  index.grow(0, 8);
  const auto chain = keys(4, 1);
  // The blocks of the chain were used together. The last block of the chain counts as the oldest.
  const std::vector<BlockKey> oldest_first(chain.rbegin(), chain.rend());
  const std::vector<int32_t> at = {6, 2, 5, 0};
  std::vector<uint8_t> taken(4);
  CHECK(index.adopt(0, oldest_first, at.data(), taken.data()) == 4);
  CHECK(taken == std::vector<uint8_t>{1, 1, 1, 1});
  index.check_integrity({});
  const auto found = match(index, chain);
  CHECK(slots(index, found) == std::vector<int32_t>{0, 5, 2, 6});
  CHECK(index.free_slots(0) == 4);
  const auto more = keys(4, 2);
  CHECK(slots(index, store(index, more)) == std::vector<int32_t>{1, 3, 4, 7});
  store(index, keys(1, 3));
  CHECK(match(index, chain).size() == 3);
  index.check_integrity({});
}

TEST_CASE("rows that contradict each other are passed over") {
  BlockIndex index({4}, "lru", 42);
  index.grow(0, 4);
  auto rows = keys(5, 1);
  rows[1] = rows[4];  // the same key twice: `adopt` uses the later row
  const std::vector<int32_t> at = {0, 1, 4, -1, 2};
  std::vector<uint8_t> taken(5);
  CHECK(index.adopt(0, rows, at.data(), taken.data()) == 2);
  CHECK(taken == std::vector<uint8_t>{1, 0, 0, 0, 1});
  CHECK(index.free_slots(0) == 2);
  index.check_integrity({});
  CHECK_THROWS_AS(index.adopt(0, rows, at.data(), taken.data()), ContractError);

  BlockIndex twice({4}, "lru", 42);
  twice.grow(0, 4);
  const std::vector<int32_t> same = {3, 3, 3, 3, 3};
  CHECK(twice.adopt(0, rows, same.data(), taken.data()) == 1);
  twice.check_integrity({});
}

TEST_CASE("the coldest blocks are leased, those in use passed over") {
  BlockIndex index({6}, "lru", 42);
  index.grow(0, 6);
  const auto chain = keys(6, 1);
  const auto entries = store(index, chain);
  std::vector<int32_t> slot(1);
  index.pin({&entries[5], 1}, slot.data());
  const auto cold = index.take_coldest(0, 2);
  CHECK(cold == std::vector<EntryId>{entries[4], entries[3]});
  std::vector<uint32_t> pins(2);
  index.copy_pins(cold, pins.data());
  CHECK(pins == std::vector<uint32_t>{1, 1});
  const std::vector<EntryId> pinned = {entries[5], entries[4], entries[3]};
  index.check_integrity(pinned);
  CHECK(index.take_coldest(0, 100).size() == 3);
  CHECK(index.take_coldest(0, 1).empty());
}

TEST_CASE("slots that are out of use come back from nowhere") {
  BlockIndex index({8, 4}, "lru", 42);
  index.grow(0, 8);
  index.grow(1, 4);
  const auto chain = keys(6, 1);
  const auto entries = store(index, chain);  // in slots 0 to 5
  std::vector<int32_t> slot(1);
  index.pin({&entries[2], 1}, slot.data());
  std::vector<uint8_t> gone(8);
  for (size_t i = 0; i < 8; i += 2) gone[i] = 1;
  CHECK(index.retire(0, gone).size() == 3);
  CHECK(index.free_slots(0) == 1);
  index.check_integrity({&entries[2], 1});
  CHECK(match(index, chain).empty());
  index.unpin({&entries[2], 1});
  index.check_integrity({});
  CHECK(index.free_slots(0) == 1);
  CHECK(slots(index, store(index, keys(1, 5))) == std::vector<int32_t>{7});
  CHECK(index.insert(0, keys(9, 6), 9).slots.size() == 4);
  CHECK_THROWS_AS(index.retire(0, std::vector<uint8_t>(7)), ContractError);
  CHECK(index.free_slots(1) == 4);
}

TEST_CASE("a place that was retired is never adopted") {
  BlockIndex index({4}, "lru", 42);
  index.grow(0, 4);
  const std::vector<uint8_t> gone = {1, 0, 0, 0};
  index.retire(0, gone);
  const auto rows = keys(2, 1);
  const std::vector<int32_t> at = {0, 1};
  std::vector<uint8_t> taken(2);
  CHECK(index.adopt(0, rows, at.data(), taken.data()) == 1);
  CHECK(index.free_slots(0) == 2);
  index.check_integrity({});
}
