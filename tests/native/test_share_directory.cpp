// Tests which pages a directory finds in the lists of pages that its peers publish (their boards), and which
// pages it copies from the peers.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "base/error.h"
#include "index/block_index.h"
#include "share_world.h"
#include "soak.h"

using namespace flexkv;

TEST_CASE("share: a page of another group or of another number of tokens is not taken") {
  SharingUnit unit(2);
  PeerDirectory directory;
  const int32_t peer = unit.join(directory);
  unit.write(0, share_key(1));
  directory.follow();
  CopiedPage page;
  PeerPlace other;
  RowFacts asked;
  asked.key = share_key(1);
  asked.tokens = kShareTokens - 1;
  CHECK(directory.bring(asked, page.bytes(), other) == PeerEnd::kAbsent);
  PeerPlace place = directory.find(share_key(1), 0);
  place.facts.tokens = kShareTokens - 1;
  CHECK(directory.read(place, page.bytes(), kShareSlotBytes) == PeerEnd::kAbsent);
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kOk);
  // The slot gets a page with the same key in another group. The directory has not read this change yet.
  unit.board.begin(0);
  unit.board.publish(0, 1, share_key(1));
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kAbsent);
  CHECK(directory.read(directory.find(share_key(1), 0), page.bytes(), kShareSlotBytes) == PeerEnd::kAbsent);
  CHECK(directory.counts(peer) == PeerCounts{1, 4, 0, 0, 0});
}

TEST_CASE("share: pieces of any number of bytes are copied whole, and nothing beside them") {
  SharingUnit unit(1);
  PeerDirectory directory;
  for (int64_t bytes = 1; bytes <= 17; ++bytes) {
    const int32_t peer = unit.join(directory, {{{64, 128, bytes}}, {}});
    unit.write(0, share_key(1));
    directory.follow();
    CopiedPage page;
    std::memset(page.bytes(), 0xA5, kShareSlotBytes);
    REQUIRE(bring_page(directory, share_key(1), page) == PeerEnd::kOk);
    CHECK(std::memcmp(page.bytes() + 128, unit.pool.base() + 64, static_cast<size_t>(bytes)) == 0);
    CHECK(page.bytes()[127] == std::byte{0xA5});
    CHECK(page.bytes()[128 + bytes] == std::byte{0xA5});
    directory.drop(peer);
  }
}

TEST_CASE("share: an index tells of the blocks that it adopts") {
  BlockIndex index({4}, "lru", 42);
  index.grow(0, 4);
  auto board = std::make_shared<SlotBoard>(4);
  index.tell(board);
  const std::array<BlockKey, 2> keys{share_key(1), share_key(2)};
  const std::array<int32_t, 2> slots{3, 1};
  std::array<uint8_t, 2> taken{};
  REQUIRE(index.adopt(0, keys, slots.data(), taken.data()) == 2);
  PeerDirectory directory;
  directory.add(SharedFile::read_only(board->fd(), board->bytes(), "board"), std::nullopt, {PeerFormat{}});
  directory.follow();
  CHECK(directory.find(share_key(1), 0).slot == 3);
  CHECK(directory.find(share_key(2), 0).slot == 1);
}

TEST_CASE("share: a slot's new content is told though its key stays") {
  SlotBoard board(2);
  PeerDirectory directory;
  directory.add(SharedFile::read_only(board.fd(), board.bytes(), "board"), std::nullopt, {PeerFormat{}});
  const int32_t slot = 1;
  RowFacts wanted{.key = share_key(1), .tokens = 16, .generation = 1, .expiry = 100, .epoch = 1};
  const auto found = [&] {
    board.begin(slot);
    board.note({&slot, 1}, {&wanted.tokens, 1}, {&wanted.generation, 1}, {&wanted.expiry, 1}, wanted.epoch);
    board.publish(slot, 0, wanted.key);
    directory.follow();
    const RowFacts facts = directory.find(share_key(1), 0).facts;
    return facts.tokens == wanted.tokens && facts.generation == wanted.generation &&
           facts.expiry == wanted.expiry && facts.epoch == wanted.epoch;
  };
  CHECK(found());
  ++wanted.generation;
  CHECK(found());
  ++wanted.expiry;
  CHECK(found());
  ++wanted.epoch;
  CHECK(found());
  ++wanted.tokens;
  CHECK(found());
}

TEST_CASE("share: of pages that went and came one learns what they come to, those that went first") {
  SharingUnit unit(4);
  PeerDirectory directory;
  unit.join(directory);
  const auto write = [&](uint32_t slot, uint64_t key) {
    unit.write(slot, share_key(key));
    directory.follow();
  };
  for (uint32_t slot = 0; slot < 4; ++slot) write(slot, slot + 1);
  CHECK(take_all(directory).size() == 4);
  write(0, 5);
  write(1, 6);
  write(0, 1);
  const auto news = take_all(directory);
  const auto names = [&](bool there) {
    std::set<uint64_t> found;
    for (const PeerNews& each : news) {
      if (each.there == there) found.insert(each.key.high);
    }
    return found;
  };
  CHECK(names(false) == std::set<uint64_t>{1, 2, 5});
  CHECK(names(true) == std::set<uint64_t>{1, 6});
  CHECK(std::ranges::is_sorted(news, {}, &PeerNews::there));
  CHECK_MESSAGE(news[3].key == share_key(6), "in the order in which they came");
  CHECK(news[4].key == share_key(1));

  std::mt19937 random(1);
  std::set<uint64_t> known{1, 3, 4, 6};
  for (int round = 0; round < 300; ++round) {
    for (uint32_t writes = random() % 8; writes > 0; --writes) write(random() % 4, random() % 8);
    for (const PeerNews& each : take_all(directory)) {
      CHECK((each.there ? known.insert(each.key.high).second : true));
      if (!each.there) known.erase(each.key.high);
    }
    for (uint64_t key = 0; key < 8; ++key) {
      CHECK(known.contains(key) == (directory.find(share_key(key), 0).peer >= 0));
    }
  }
}

TEST_CASE("share: of a page in several places only the one that is withdrawn is forgotten") {
  for (const bool earlier : {true, false}) {
    PeerDirectory directory;
    SharingUnit one(2);
    SharingUnit other(2);
    const int32_t first = one.join(directory);
    const int32_t second = other.join(directory);
    one.write(0, share_key(1));
    other.write(0, share_key(1));  // the same key in the same slot number of another unit
    directory.follow();
    (earlier ? one : other).board.withdraw(0);
    directory.follow();
    CHECK(directory.find(share_key(1), 0).peer == (earlier ? second : first));
    CHECK(directory.pages(earlier ? second : first) == 1);
    CHECK(directory.pages(earlier ? first : second) == 0);
    // While a unit moves a page to another slot, readers may see the page in both slots.
    SharingUnit& left = earlier ? other : one;
    left.write(1, share_key(1));
    directory.follow();
    left.board.withdraw(earlier ? 0 : 1);
    directory.follow();
    CHECK(directory.find(share_key(1), 0).slot == (earlier ? 1 : 0));
  }
}

TEST_CASE("share: what changes while a large board is being read is not missed") {
  constexpr uint32_t kSlots = 20'000;  // more rows than one call reads
  SlotBoard board(kSlots);
  PeerDirectory directory;
  directory.add(SharedFile::read_only(board.fd(), board.bytes(), "board"), std::nullopt, {PeerFormat{}});
  REQUIRE(directory.follow() < kSlots);
  board.publish(0, 0, share_key(1));  // changes a row that has been read already
  while (directory.follow() > 0) {
  }
  CHECK(directory.find(share_key(1), 0).peer == 0);
  CHECK(directory.overruns() == 0);
}

TEST_CASE("share: others are found while a large peer is being forgotten, which no follower undoes") {
  constexpr uint32_t kSlots = 64 * 1024;
  SlotBoard board(kSlots);
  for (uint32_t slot = 0; slot < kSlots; ++slot) board.publish(slot, 0, share_key(slot));
  SharingUnit other(1);
  other.write(0, share_key(kSlots));
  PeerDirectory directory;
  const int32_t large =
      directory.add(SharedFile::read_only(board.fd(), board.bytes(), "board"), std::nullopt, {PeerFormat{}});
  other.join(directory);
  while (directory.follow() > 0) {
  }
  REQUIRE(directory.pages(large) == kSlots);
  // The number of keys is the number of blocks of a long prompt. The directory has the page of the first key
  // throughout the test.
  std::vector<BlockKey> wanted(1000, share_key(kSlots + 2));
  wanted.front() = share_key(kSlots);
  std::vector<PeerPlace> places;
  size_t partly = 0;
  std::thread dropping([&] { directory.drop(large); });
  for (size_t left = kSlots; left > 0;) {
    directory.find(wanted, 0, {}, places);
    CHECK(places.front().peer == 1);
    board.begin(0);
    board.publish(0, 0, share_key(kSlots + 1));
    directory.follow();
    left = directory.pages(large);
    partly += left > 0 && left < kSlots;
  }
  dropping.join();
  CHECK(partly > 1);
  CHECK(directory.find(share_key(kSlots - 1), 0).peer == -1);
  CHECK(directory.find(share_key(kSlots + 1), 0).peer == -1);
}

TEST_CASE("share: a page is copied by the format of its group, and named by key and group") {
  const int64_t half = kShareSlotBytes / 2;
  SharingUnit unit(4);
  PeerDirectory directory;
  directory.add(SharedFile::read_only(unit.board.fd(), unit.board.bytes(), "board"), unit.mapped_pool(),
                {{{{0, 0, kShareSlotBytes}}, {}}, {{{half, 0, half}}, {}}});
  unit.write(0, share_key(1), 0, 0);
  unit.write(1, share_key(1), 0, 1);
  unit.write(2, share_key(2), 0, 2);
  directory.follow();
  CHECK_MESSAGE(take_all(directory).size() == 2, "the peer has no group 2");
  CHECK(directory.find(share_key(1), 0).slot == 0);
  CHECK(directory.find(share_key(1), 1).slot == 1);
  CHECK(directory.find(share_key(2), 2).peer == -1);
  CopiedPage page;
  CHECK(bring_page(directory, share_key(1), page, 0, 0) == PeerEnd::kOk);
  CHECK(page.is(share_key(1)));
  CopiedPage other;
  CHECK(bring_page(directory, share_key(1), other, 0, 1) == PeerEnd::kOk);
  CHECK(other.words[0] == page_word(share_key(1), kShareWords / 2));
  CHECK_MESSAGE(other.words[kShareWords / 2] == 0, "group 1 has half as many bytes");
  for (const uint32_t group : {2u, 3u, UINT32_MAX}) {
    CHECK(bring_page(directory, share_key(2), page, 0, group) == PeerEnd::kAbsent);
  }
  unit.write(0, share_key(1), 0, 1);  // the slot now has another group's page with the same key
  directory.follow();
  CHECK(bring_page(directory, share_key(1), page, 0, 0) == PeerEnd::kAbsent);
}

TEST_CASE("share: files that are not what was announced are refused") {
  const SharingUnit unit(4);
  for (const int64_t bytes : {unit.board.bytes() - 4096, unit.board.bytes() + 4096, int64_t{0}}) {
    CHECK_THROWS_AS(SharedFile::read_only(unit.board.fd(), bytes, "board"), ClosedError);
  }
  const int unsealed = memfd_create("test-unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(unsealed, 4096) == 0);
  CHECK_THROWS_AS(SharedFile::read_only(unsealed, 4096, "board"), ClosedError);
  close(unsealed);
  PeerDirectory directory;
  const auto board = [&] { return SharedFile::read_only(unit.board.fd(), unit.board.bytes(), "board"); };
  // Tries two pools that are too small: in the first one, the last slot ends one byte beyond the pool's end.
  // The second one has one slot fewer than the board.
  PeerPool pool = unit.mapped_pool();
  pool.slots_offset = 1;
  CHECK_THROWS_AS(directory.add(board(), std::move(pool), {PeerFormat{}}), ClosedError);
  const SharedFile small = SharedFile::make("test-pool", 3 * kShareSlotBytes);
  CHECK_THROWS_AS(directory.add(board(),
                                PeerPool{SharedFile::read_only(small.fd(), small.bytes(), "pool"), 0,
                                         kShareSlotBytes, 4, small.bytes()},
                                {PeerFormat{}}),
                  ClosedError);
  PeerPool no_board = unit.mapped_pool();
  CHECK_THROWS_AS(directory.add(std::move(no_board.file), std::nullopt, {PeerFormat{}}), ClosedError);
  CHECK_NOTHROW(directory.add(board(), unit.mapped_pool(), {PeerFormat{}}));
}

TEST_CASE("share: neither rows nor slots read beside a writer mix two pages") {
  SharingUnit unit(1);
  PeerDirectory directory;
  unit.join(directory);
  auto mapped = SharedFile::read_only(unit.board.fd(), unit.board.bytes(), "board");
  const BoardRow& row = board_parts(mapped.base()).rows[0];
  const uint64_t wanted = kThreadSanitizer ? 500 : 5'000;
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const FastWriter writer(unit);
  CopiedPage page;
  uint64_t whole = 0;
  uint64_t changed = 0;
  bool mixed = false;
  while ((whole < wanted || changed == 0) && !mixed && std::chrono::steady_clock::now() < late) {
    uint64_t version = 0;
    const auto facts = read_row(row, version);
    if (!facts) continue;
    mixed = !(facts->key == share_key(facts->key.high));
    const PeerEnd end = directory.read({0, 0, *facts}, page.bytes(), kShareSlotBytes);
    whole += end == PeerEnd::kOk;
    changed += end == PeerEnd::kChanged;
    mixed |= end == PeerEnd::kOk && !page.is(facts->key);
  }
  CHECK_FALSE(mixed);
  CHECK(whole >= wanted);
  CHECK(changed > 0);
}
