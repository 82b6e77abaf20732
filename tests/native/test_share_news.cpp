// Tests the news that a directory reports about its peers' pages: it reports each page once, and the caller
// takes the news of all pages or only of given ones.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "share_world.h"
#include "soak.h"

using namespace flexkv;

namespace {

RowFacts page(uint64_t number, uint32_t group = 0) {
  RowFacts facts;
  facts.key = share_key(number);
  facts.group = group;
  facts.tokens = kShareTokens;
  return facts;
}

// The pages that, according to the news taken so far, some peer has.
struct KnownPages {
  std::set<uint64_t> pages;

  void take(const std::vector<PeerNews>& news) {
    CHECK(std::ranges::is_sorted(news, {}, &PeerNews::there));
    for (const PeerNews& each : news) {
      if (each.there) {
        pages.insert(each.key.high);
      } else {
        pages.erase(each.key.high);
      }
    }
  }
};

}  // namespace

TEST_CASE("share news: of the pages asked for one learns all, and of others nothing") {
  PendingNews news;
  for (uint64_t number = 0; number < 100; ++number) news.tell(page(number), true);
  news.tell(page(7, 1), true);
  news.tell(page(5), false);
  const std::array<BlockKey, 4> asked{share_key(9), share_key(5), share_key(7), share_key(200)};
  std::vector<PeerNews> out;
  CHECK(news.take_of(asked, 0, out) == 3);
  REQUIRE(out.size() == 3);
  CHECK((out[0].key == share_key(5) && !out[0].there));
  CHECK_MESSAGE((out[1].key == share_key(7) && out[1].there), "in the order in which they were told");
  CHECK((out[2].key == share_key(9) && out[2].there));
  CHECK(news.size() == 98);
  CHECK(news.take_of(asked, 0, out) == 0);
  CHECK(out.empty());
  CHECK(news.take_of(asked, 1, out) == 1);
  CHECK(news.take(1000, out) == 97);
  CHECK(std::ranges::none_of(out, [](const PeerNews& each) {
    return each.key == share_key(5) || each.key == share_key(7) || each.key == share_key(9);
  }));
  CHECK(news.size() == 0);
  CHECK(news.take(1000, out) == 0);
}

TEST_CASE("share news: a page that went and came back is both, also if only it is asked for") {
  PendingNews news;
  news.tell(page(1), false);
  news.tell(page(1), true);
  news.tell(page(2), true);
  news.tell(page(2), false);
  std::vector<PeerNews> out;
  const std::array<BlockKey, 2> asked{share_key(1), share_key(2)};
  CHECK(news.take_of(asked, 0, out) == 2);
  REQUIRE(out.size() == 3);
  CHECK((!out[0].there && !out[1].there && out[2].there));
  CHECK(out[2].key == share_key(1));
}

TEST_CASE("share news: whatever is taken in whatever order, what is known in the end is what was told") {
  std::mt19937 random(3);
  PendingNews news;
  KnownPages known;
  std::set<uint64_t> there;
  std::vector<PeerNews> out;
  constexpr uint64_t kPages = 3000;  // enough news that old records are removed
  for (int round = 0; round < 200; ++round) {
    for (uint32_t told = random() % 2000; told > 0; --told) {
      const uint64_t number = random() % kPages;
      const bool came = random() % 2 == 0;
      if (came == there.contains(number)) continue;  // peers report only changes
      news.tell(page(number), came);
      if (came) {
        there.insert(number);
      } else {
        there.erase(number);
      }
    }
    std::vector<BlockKey> asked;
    for (int count = 0; count < 50; ++count) asked.push_back(share_key(random() % kPages));
    news.take_of(asked, 0, out);
    known.take(out);
    CHECK(std::ranges::all_of(asked, [&](const BlockKey& key) {
      return known.pages.contains(key.high) == there.contains(key.high);
    }));
    if (random() % 4 == 0) {
      news.take(random() % 5000, out);
      known.take(out);
    }
  }
  while (news.take(1000, out) > 0) known.take(out);
  CHECK(known.pages == there);
  CHECK(news.size() == 0);
}

TEST_CASE("share news: one thread tells while another takes, and nothing is lost") {
  PendingNews news;
  KnownPages known;
  constexpr uint64_t kPages = 512;
  const uint64_t rounds = kThreadSanitizer ? 20 : 200;
  std::atomic<bool> told{false};
  std::thread teller([&] {
    for (uint64_t round = 0; round < rounds; ++round) {
      for (uint64_t number = 0; number < kPages; ++number) news.tell(page(number), round % 2 == 0);
    }
    for (uint64_t number = 0; number < kPages; number += 2) news.tell(page(number), true);
    told.store(true);
  });
  std::mt19937 random(4);
  std::vector<PeerNews> out;
  for (bool last = false; !last;) {
    last = told.load();
    std::array<BlockKey, 16> asked{};
    for (BlockKey& key : asked) key = share_key(random() % kPages);
    news.take_of(asked, 0, out);
    known.take(out);
    news.take(random() % 64, out);
    known.take(out);
  }
  teller.join();
  while (news.take(1000, out) > 0) known.take(out);
  CHECK(known.pages.size() == kPages / 2);
  CHECK(std::ranges::all_of(known.pages, [](uint64_t number) { return number % 2 == 0; }));
}
