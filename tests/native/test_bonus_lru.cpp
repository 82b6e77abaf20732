// Tests the policy bonus_lru: it evicts a block that was hit later than LRU does. Some of these tests check
// in which order it evicts a chain if only some of the chain's blocks were hit.
#include <doctest/doctest.h>

#include <vector>

#include "index/block_index.h"
#include "index_steps.h"

using namespace flexkv;

namespace {

struct BonusIndex : BlockIndex {
  explicit BonusIndex(uint32_t slots) : BlockIndex({slots}, "bonus_lru", 42) { grow(0, slots); }

  std::vector<BlockKey> store(std::span<const BlockKey> offered) {
    return insert_and_publish(*this, offered).evicted;
  }

  size_t has(std::span<const BlockKey> wanted) const {
    std::vector<EntryId> entries(wanted.size());
    return find(0, wanted, true, entries.data());
  }

  void use(std::span<const BlockKey> wanted, bool hit) { flexkv::use(*this, wanted, hit); }

  // Stores `others` new blocks, one by one. Returns how many of the blocks `of` are still cached.
  size_t left_after(size_t others, std::span<const BlockKey> of) {
    for (size_t i = 0; i < others; ++i) store(keys(1, ++seed_));
    check_integrity({});
    return has(of);
  }

 private:
  uint64_t seed_ = 1000;
};

}  // namespace

TEST_CASE("bonus_lru: a block that was hit stays one capacity longer than one that was not") {
  for (const bool hit : {false, true}) {
    CAPTURE(hit);
    BonusIndex index(16);
    const auto block = keys(1, 1);
    index.store(block);
    index.use(block, hit);
    const size_t stays = hit ? 31 : 15;
    CHECK(index.left_after(stays, block) == 1);
    CHECK(index.left_after(2, block) == 0);
  }
}

TEST_CASE("bonus_lru: hits do not add up, and each begins the bonus anew") {
  BonusIndex index(16);
  const auto block = keys(1, 2);
  index.store(block);
  for (int i = 0; i < 5; ++i) index.use(block, true);
  CHECK(index.left_after(30, block) == 1);
  index.use(block, true);
  CHECK(index.left_after(30, block) == 1);
  CHECK(index.left_after(3, block) == 0);
}

TEST_CASE("bonus_lru: a lease that is no request's keeps what a block was, and takes no time") {
  BonusIndex index(16);
  const auto block = keys(1, 3), other = keys(1, 4);
  index.store(block);
  index.use(block, true);
  index.store(other);
  for (int i = 0; i < 100; ++i) index.use(other, false);
  CHECK(index.left_after(30, block) == 1);
  CHECK(index.has(other) == 0);
}

TEST_CASE("bonus_lru: a block that comes back after it has left begins anew") {
  BonusIndex index(4);
  const auto block = keys(1, 5);
  index.store(block);
  index.use(block, true);
  CHECK(index.evict(0, 4) == block);
  index.store(block);
  CHECK(index.left_after(3, block) == 1);
  CHECK(index.left_after(1, block) == 0);
}

TEST_CASE("bonus_lru: of a request, what it found outlives what it stored, each from its end") {
  BonusIndex index(8);
  const auto chain = keys(6, 6);
  index.store(chain);
  std::vector<EntryId> entries(chain.size());
  index.find(0, chain, true, entries.data());
  index.touch(entries, 3);
  index.check_integrity({});
  std::vector<EntryId> again(chain.size());
  CHECK(index.match_prefix(0, chain, again.data()) == 6);
  CHECK(again == entries);
  CHECK(index.evict(0, 6) ==
        std::vector<BlockKey>{chain[5], chain[4], chain[3], chain[2], chain[1], chain[0]});
}

TEST_CASE("bonus_lru: the bonus is that of the slots that are left") {
  BonusIndex index(16);
  std::vector<uint8_t> gone(16, 0);
  std::fill(gone.begin() + 8, gone.end(), uint8_t{1});
  index.retire(0, gone);
  const auto block = keys(1, 7);
  index.store(block);
  index.use(block, true);
  CHECK(index.left_after(14, block) == 1);
  CHECK(index.left_after(4, block) == 0);
}
