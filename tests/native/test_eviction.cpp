// Checks the contract between the block index and its eviction policies. The tests use every policy of
// flexkv, those of two_queues.h and most_recent.h, and a policy that records the index's calls.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/block_index.h"
#include "index_steps.h"
#include "most_recent.h"
#include "soak.h"
#include "two_queues.h"

using namespace flexkv;

namespace {

std::vector<PolicyKind> all_kinds() {
  std::vector<PolicyKind> kinds(policy_kinds().begin(), policy_kinds().end());
  kinds.push_back(two_queues_kind());
  kinds.push_back(most_recent_kind());
  return kinds;
}

std::vector<BlockKey> reversed(std::vector<BlockKey> of) {
  std::reverse(of.begin(), of.end());
  return of;
}

// Runs all operations of a block index in random order.
void take_random_steps(const PolicyKind& policy) {
  std::mt19937 random(15);
  BlockIndex index({300, 100}, policy, 7);
  index.grow(0, 100);
  index.grow(1, 100);
  const auto universe = keys(500, 16);
  std::vector<std::vector<EntryId>> leases, writes;
  const auto pick = [&](auto& from) {
    const size_t at = random() % from.size();
    auto taken = from[at];
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(at));
    return taken;
  };
  for (int step = 0; step < (kThreadSanitizer ? 2'000 : 20'000); ++step) {
    const uint32_t group = random() % 2;
    const size_t begin = random() % 450, count = 1 + random() % 50;
    const auto range = std::span(universe).subspan(begin, std::min<size_t>(count, universe.size() - begin));
    switch (random() % 8) {
      case 0:
      case 1: {
        auto entries = match(index, range, group);
        std::vector<int32_t> slots(entries.size());
        if (random() % 2) {
          std::vector<EntryId> again(range.size());
          slots.resize(range.size());
          again.resize(index.match_and_pin(group, range, again.data(), slots.data()));
          slots.resize(again.size());
          CHECK(again == entries);
        } else {
          index.pin(entries, slots.data());
        }
        CHECK(std::set<int32_t>(slots.begin(), slots.end()).size() == slots.size());
        if (!entries.empty()) leases.push_back(entries);
        break;
      }
      case 2:
      case 3: {
        auto done = index.insert(group, range, random() % 60, 0, 0, random() % 4 == 0);
        CHECK(done.known + done.dropped + done.entries.size() == range.size());
        if (!done.entries.empty()) writes.push_back(done.entries);
        break;
      }
      case 4:
        if (!leases.empty()) index.unpin(pick(leases), Use{.hit = random() % 2 == 0});
        break;
      case 5:
        if (!writes.empty()) {
          const auto entries = pick(writes);
          std::vector<uint8_t> ok(entries.size()), published(entries.size());
          for (auto& flag : ok) flag = random() % 4 > 0;
          index.finish(entries, ok.data(), published.data());
        }
        break;
      case 6: {
        std::vector<EntryId> found(range.size());
        std::vector<uint8_t> removed(range.size());
        index.find(group, range.first(std::min<size_t>(3, range.size())), false, found.data());
        index.remove(std::span(found).first(std::min<size_t>(3, range.size())), removed.data());
        break;
      }
      default: {
        std::vector<EntryId> guesses(20);
        for (auto& guess : guesses) guess = random() % 600;
        index.touch(guesses, random() % guesses.size());
        if (random() % 500 == 0) index.clear();
        if (random() % 100 == 0 && index.up_slots(0) < 300) index.grow(0, index.up_slots(0) + 20);
      }
    }
    if (step % 20 == 0) {
      std::vector<EntryId> pinned;
      for (const auto* lists : {&leases, &writes}) {
        for (const auto& list : *lists) pinned.insert(pinned.end(), list.begin(), list.end());
      }
      index.check_integrity(pinned);
    }
  }
}

// An LRU policy that records the arguments of the index's calls.
class Recorder final : public EvictionPolicy {
 public:
  explicit Recorder(const PolicyRoom& room) : room_(room) { last = this; }

  void admit(EntryId first, EntryId last_of, const Use& use) override {
    room_.table.link_after(room_.first_head, first, last_of);
    hits.push_back(use.hit);
  }
  EntryId take_victim() override {
    const EntryId oldest = room_.table[room_.first_head].newer;
    if (oldest == room_.first_head) return kNoEntry;
    room_.table.unlink(oldest, oldest);
    return oldest;
  }
  void missed(std::span<const EntryId> entries, std::span<const uint32_t> hashes) override {
    REQUIRE(entries.size() == hashes.size());
    missed_hashes.insert(missed_hashes.end(), hashes.begin(), hashes.end());
  }
  void gone(EntryId, uint32_t hash, Leaving why) override {
    (why == Leaving::kEvicted ? evicted_hashes : removed_hashes).push_back(hash);
  }
  void clear() override { ++clears; }

  std::vector<bool> hits;
  std::vector<uint32_t> missed_hashes, evicted_hashes, removed_hashes;
  int clears = 0;
  static inline Recorder* last = nullptr;

 private:
  PolicyRoom room_;
};

PolicyKind recorder_kind(bool follows) {
  return {.name = "recorder",
          .follows = follows,
          .make = [](const PolicyRoom& room) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<Recorder>(room);
          }};
}

}  // namespace

TEST_CASE("thousands of random steps keep every invariant, with every policy") {
  for (const PolicyKind& kind : all_kinds()) {
    CAPTURE(kind.name);
    take_random_steps(kind);
  }
}

TEST_CASE("every policy evicts all blocks that nobody leases, and no others") {
  for (const PolicyKind& kind : all_kinds()) {
    CAPTURE(kind.name);
    BlockIndex index({32}, kind, 3);
    index.grow(0, 32);
    const auto chain = keys(32, 1);
    store(index, chain);
    use(index, std::span(chain).subspan(8, 8));
    std::vector<EntryId> leased(4);
    std::vector<int32_t> slots(4);
    REQUIRE(index.match_and_pin(0, std::span(chain).subspan(12, 4), leased.data(), slots.data()) == 4);
    CHECK(index.evict(0, 100).size() == 28);
    CHECK(match(index, std::span(chain).subspan(12, 4)).size() == 4);
    index.check_integrity(leased);
    index.unpin(leased);
    CHECK(index.evict(0, 100).size() == 4);
    index.check_integrity({});
  }
}

TEST_CASE("a chain is found as one walk after every policy admitted it") {
  for (const PolicyKind& kind : policy_kinds()) {
    CAPTURE(kind.name);
    BlockIndex index({64}, kind, 3);
    index.grow(0, 64);
    const auto chain = keys(64, 2);
    const auto entries = store(index, chain);
    use(index, chain);
    // The policy keeps the chain in order in one list, so the index evicts the chain from its end, block by
    // block.
    CHECK(index.evict(0, 64) == reversed(chain));
    CHECK(std::is_sorted(entries.begin(), entries.end()));
  }
}

TEST_CASE("a policy is told of hits, misses and what left, and why") {
  BlockIndex index({4}, recorder_kind(true), 3);
  index.grow(0, 4);
  Recorder& told = *Recorder::last;
  const auto chain = keys(3, 4);
  const auto entries = store(index, chain);
  CHECK(told.hits == std::vector<bool>{false});
  const auto first_hashes = told.missed_hashes;
  CHECK(first_hashes.size() == 3);
  use(index, chain);
  CHECK(told.hits == std::vector<bool>{false, true});

  index.touch(entries, 2);
  CHECK(told.hits == std::vector<bool>{false, true, false, true});  // touch() reports the chain's end first

  CHECK(index.evict(0, 1) == std::vector<BlockKey>{chain[2]});
  CHECK(told.evicted_hashes == std::vector<uint32_t>{first_hashes[2]});
  uint8_t removed = 0;
  index.remove(std::span(entries).first(1), &removed);
  CHECK(told.removed_hashes == std::vector<uint32_t>{first_hashes[0]});

  store(index, chain);
  CHECK(std::vector(told.missed_hashes.begin() + 3, told.missed_hashes.end()) ==
        std::vector<uint32_t>{first_hashes[0], first_hashes[2]});
  const Inserted failing = index.insert(0, keys(1, 5), 1);
  const uint8_t ok = 0;
  index.finish(failing.entries, &ok, &removed);
  CHECK(told.removed_hashes == std::vector<uint32_t>{first_hashes[0], told.missed_hashes.back()});
  CHECK(told.evicted_hashes.size() == 1);
  index.clear();
  CHECK(told.clears == 1);
  CHECK(told.removed_hashes.size() == 2);
}

TEST_CASE("a policy that does not follow blocks hears of none") {
  BlockIndex index({4}, recorder_kind(false), 3);
  index.grow(0, 4);
  store(index, keys(3, 4));
  index.evict(0, 2);
  CHECK(Recorder::last->missed_hashes.empty());
  CHECK(Recorder::last->evicted_hashes.empty());
}

TEST_CASE("notes start anew with each block of an entry") {
  BlockIndex index({2}, two_queues_kind(), 3);
  index.grow(0, 2);
  const auto first = keys(2, 6);
  const auto entries = store(index, first);
  use(index, first);
  index.evict(0, 2);
  index.check_integrity({});
  const auto again = store(index, keys(2, 7));
  CHECK(std::set<EntryId>(again.begin(), again.end()) == std::set<EntryId>(entries.begin(), entries.end()));
  index.check_integrity({});
}

TEST_CASE("two queues and ghosts: a scan displaces what came once, and not what came back") {
  for (const bool with_ghosts : {true, false}) {
    CAPTURE(with_ghosts);
    BlockIndex index({8}, with_ghosts ? two_queues_kind() : policy_kind("lru"), 3);
    index.grow(0, 8);
    const auto wanted = keys(4, 8);
    store(index, wanted);
    store(index, keys(8, 9));  // evicts `wanted`; two_queues.h remembers its keys
    CHECK(match(index, wanted).empty());
    store(index, wanted);  // stores `wanted` again
    for (uint64_t scan = 10; scan < 26; ++scan) store(index, keys(1, scan));
    CHECK(match(index, wanted).size() == (with_ghosts ? 4 : 0));
    index.check_integrity({});
  }
}

TEST_CASE("most recent first: what was used last is evicted before what was used earlier") {
  BlockIndex index({8}, most_recent_kind(), 3);
  index.grow(0, 8);
  const auto early = keys(1, 50), late = keys(1, 51);
  store(index, early);
  store(index, late);
  CHECK(index.evict(0, 1) == late);
  CHECK(match(index, early).size() == 1);
  index.check_integrity({});
}

TEST_CASE("an index refuses a policy that it does not know or cannot hold") {
  CHECK_THROWS_WITH_AS(BlockIndex({4}, "random", 1),
                       doctest::Contains("eviction policy 'random' is unknown; allowed are: lru, bonus_lru"),
                       ConfigError);
  PolicyKind kind = two_queues_kind();
  for (const size_t lists : {size_t{0}, PolicyKind::kMaxLists + 1}) {
    kind.lists = lists;
    CHECK_THROWS_AS(BlockIndex({4}, kind, 1), ConfigError);
  }
  kind.lists = PolicyKind::kMaxLists;
  BlockIndex index({4}, kind, 1);
  index.check_integrity({});
}
