// Tests copies of another unit's pages. The other unit may overwrite a page during the copy. A copy succeeds
// only if all its bytes belong to the same version of the page.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "index/block_index.h"
#include "share_world.h"
#include "soak.h"

using namespace flexkv;

TEST_CASE("share: what a unit publishes is found, copied and withdrawn") {
  SharingUnit unit(8);
  PeerDirectory directory;
  const int32_t peer = unit.join(directory);
  unit.write(3, share_key(1));
  directory.follow();
  const auto news = take_all(directory);
  REQUIRE(news.size() == 1);
  CHECK((news[0].there && news[0].key == share_key(1) && news[0].tokens == kShareTokens));
  CopiedPage page;
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kOk);
  CHECK(page.is(share_key(1)));
  unit.board.withdraw(3);
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kAbsent);  // before follow()
  directory.follow();
  CHECK_FALSE(take_all(directory).at(0).there);
  CHECK(directory.counts(peer) == PeerCounts{1, 1, 0, 0, 0});
}

TEST_CASE("share: a page that two units have is lost only with the last") {
  SharingUnit one(4);
  SharingUnit other(4);
  PeerDirectory directory;
  const int32_t first = one.join(directory);
  other.join(directory);
  one.write(0, share_key(1));
  other.write(2, share_key(1));
  directory.follow();
  CHECK(take_all(directory).size() == 1);
  directory.drop(first);
  CHECK(take_all(directory).empty());
  CopiedPage page;
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kOk);
  other.board.retire();
  directory.follow();
  CHECK_FALSE(take_all(directory).at(0).there);
  other.write(2, share_key(1));
  directory.follow();
  CHECK_MESSAGE(take_all(directory).empty(), "a unit that has retired publishes nothing");
}

TEST_CASE("share: a reader that the ring overruns reads all rows again") {
  SharingUnit unit(16);
  PeerDirectory directory;
  unit.join(directory);
  directory.follow();
  for (uint64_t number = 1; number <= kRingChanges; ++number) {
    unit.write(static_cast<uint32_t>(number % 16), share_key(number));
  }
  while (directory.follow() > 0) {
  }
  CHECK(directory.overruns() == 1);
  size_t there = 0;
  for (uint64_t number = kRingChanges - 15; number <= kRingChanges; ++number) {
    there += directory.find(share_key(number), 0).peer == 0;
  }
  CHECK(there == 16);
}

TEST_CASE("share: an index tells of every change to a slot") {
  BlockIndex index({4}, "lru", 42);
  index.grow(0, 4);
  auto board = std::make_shared<SlotBoard>(4);
  PeerDirectory directory;
  directory.add(SharedFile::read_only(board->fd(), board->bytes(), "board"), std::nullopt, {PeerFormat{}});
  std::vector<BlockKey> keys;
  for (uint64_t number = 0; number < 6; ++number) keys.push_back(share_key(number));
  const uint8_t good[4] = {1, 1, 1, 0};
  uint8_t done[4];
  const Inserted first = index.insert(0, {keys.data(), 2}, 2);
  index.finish(first.entries, good, done);
  index.tell(board);  // two pages are already published
  const Inserted more = index.insert(0, {keys.data() + 2, 2}, 2);
  directory.follow();
  CHECK(take_all(directory).size() == 2);
  index.finish(more.entries, good + 2, done);  // the second write failed
  directory.follow();
  CHECK(take_all(directory).size() == 1);
  index.insert(0, {keys.data() + 4, 2}, 2);  // one block gets the free slot, the other evicts a page
  directory.follow();
  auto news = take_all(directory);
  REQUIRE(news.size() == 1);
  CHECK_FALSE(news[0].there);
  index.clear();
  directory.follow();
  CHECK(take_all(directory).size() == 2);
}

TEST_CASE("share: no page is taken that its holder may keep for a shorter time") {
  SharingUnit unit(2);
  PeerDirectory directory;
  unit.join(directory);
  unit.write(0, share_key(1), 1000);
  directory.follow();
  CHECK(take_all(directory).at(0).expiry == 1000);
  CopiedPage page;
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kAbsent);
  CHECK(bring_page(directory, share_key(1), page, 1001) == PeerEnd::kAbsent);
  CHECK(bring_page(directory, share_key(1), page, 1000) == PeerEnd::kOk);
}

TEST_CASE("share: a page that does not match its digest is not taken") {
  SharingUnit unit(2);
  PeerDirectory directory;
  constexpr int64_t kRunBytes = kShareSlotBytes - 64;
  const int32_t peer = unit.join(directory, {{{0, 0, kRunBytes}}, {{0, kRunBytes, kRunBytes, kRunBytes}}});
  unit.write(0, share_key(1));
  directory.follow();
  CopiedPage page;
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kDigest);
  const uint64_t digest = run_digest(unit.pool.base(), kRunBytes);
  std::memcpy(unit.pool.base() + kRunBytes, &digest, 8);
  CHECK(bring_page(directory, share_key(1), page) == PeerEnd::kOk);
  CHECK(page.words[kRunBytes / 8] == digest);
  CHECK(directory.counts(peer) == PeerCounts{1, 0, 0, 1, 0});
}

TEST_CASE("share: no copy beside a writer that reuses slots is another page") {
  SharingUnit unit(16);
  PeerDirectory directory;
  unit.join(directory);
  // Makes fewer copies with a sanitizer, because a sanitizer slows down each copy. `make soak` makes a
  // million copies.
  const uint64_t copies = uint64_t{kThreadSanitizer ? 1'000u : (kSanitizer ? 20'000u : 200'000u)} *
                          static_cast<uint64_t>(soak_factor());
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(200);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> wrong{0};
  std::array<std::atomic<uint64_t>, kPeerEnds> ends{};
  {
    const FastWriter writer(unit);
    std::thread follower([&] {
      std::vector<PeerNews> news;
      while (!stop.load(std::memory_order_relaxed)) {
        directory.follow();
        directory.take(kMostNews, news);
      }
    });
    std::vector<std::thread> readers;
    for (int reader = 0; reader < 2; ++reader) {
      readers.emplace_back([&, reader] {
        std::mt19937 random(static_cast<unsigned>(reader));
        CopiedPage page;
        const auto of = [&](PeerEnd end) { return ends[static_cast<size_t>(end)].load(); };
        while ((of(PeerEnd::kOk) < copies || of(PeerEnd::kChanged) == 0) &&
               std::chrono::steady_clock::now() < late) {
          const uint64_t newest = writer.newest();
          const BlockKey key = share_key(newest - std::min<uint64_t>(newest, random() % 16));
          const PeerEnd end = bring_page(directory, key, page);
          ends[static_cast<size_t>(end)].fetch_add(1);
          if (end == PeerEnd::kOk && !page.is(key)) wrong.fetch_add(1);
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    stop.store(true);
    follower.join();
  }
  CHECK(wrong.load() == 0);
  CHECK(ends[static_cast<size_t>(PeerEnd::kOk)].load() >= copies);
  CHECK(ends[static_cast<size_t>(PeerEnd::kChanged)].load() > 0);
}

TEST_CASE("share: control, a reader that leaves out the second look takes wrong pages") {
  SharingUnit unit(1);
  const PeerPool pool = unit.mapped_pool();
  auto rows = SharedFile::read_only(unit.board.fd(), unit.board.bytes(), "board");
  const BoardRow& row = board_parts(rows.base()).rows[0];
  const FastWriter writer(unit);
  CopiedPage page;
  bool wrong = false;
  const auto ends = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!wrong && std::chrono::steady_clock::now() < ends) {
    uint64_t version = 0;
    const auto facts = read_row(row, version);
    if (!facts) continue;
    copy_words(page.bytes(), pool.slot(0), kShareSlotBytes);
    wrong = !page.is(facts->key);
  }
  CHECK(wrong);
}
