#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/block_index.h"
#include "index/sha256.h"
#include "index_steps.h"

using namespace flexkv;

namespace {

std::string hex(const Sha256Digest& digest) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) text += {digits[byte >> 4], digits[byte & 15]};
  return text;
}

std::string hash(const std::string& text, Sha256Compress compress) {
  Sha256 sha(compress);
  for (size_t at = 0; at < text.size(); at += 37) {
    sha.update(text.data() + at, std::min<size_t>(37, text.size() - at));
  }
  return hex(sha.finish());
}

// An index of one group. All slots of the group are up.
struct FullIndex : BlockIndex {
  explicit FullIndex(uint32_t slots) : BlockIndex({slots}, "lru", 42) { grow(0, slots); }
};

std::vector<EntryId> pin(BlockIndex& index, std::span<const BlockKey> wanted) {
  const auto entries = match(index, wanted);
  std::vector<int32_t> slots(entries.size());
  index.pin(entries, slots.data());
  return entries;
}

}  // namespace

TEST_CASE("SHA-256 gives the FIPS 180-4 vectors, by instruction and without") {
  std::vector<Sha256Compress> forms = {sha256_compress_portable};
  if (sha256_native_compress()) forms.push_back(sha256_native_compress());
  for (const Sha256Compress form : forms) {
    CHECK(hash("", form) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hash("abc", form) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", form) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hash(std::string(1'000'000, 'a'), form) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST_CASE("matching stops at the first miss and ignores what is pending") {
  FullIndex index(64);
  const auto chain = keys(20, 1);
  store(index, std::span(chain).first(5));
  const Inserted pending = index.insert(0, std::span(chain).subspan(5, 3), 8);
  store(index, std::span(chain).subspan(8, 4));
  CHECK(match(index, chain).size() == 5);
  CHECK(match(index, std::span(chain).subspan(8)).size() == 4);
  const std::vector<uint8_t> ok = {1, 0, 1};
  std::vector<uint8_t> published(3);
  index.finish(pending.entries, ok.data(), published.data());
  CHECK(published == ok);
  CHECK(match(index, chain).size() == 6);
  index.check_integrity({});
}

TEST_CASE("chains that share a prefix, lie backwards or are scattered are matched whole") {
  FullIndex index(4096);
  const auto chain = keys(1000, 2);
  auto backwards = keys(300, 3);
  store(index, chain);
  std::reverse(backwards.begin(), backwards.end());
  store(index, backwards);
  std::reverse(backwards.begin(), backwards.end());
  std::vector<BlockKey> branch(chain.begin(), chain.begin() + 400);
  branch.insert(branch.end(), backwards.begin(), backwards.end());
  std::vector<BlockKey> scattered = branch;
  std::shuffle(scattered.begin(), scattered.end(), std::mt19937(4));
  for (const auto& wanted : {chain, backwards, branch, scattered}) {
    const auto entries = match(index, wanted);
    REQUIRE(entries.size() == wanted.size());
    std::vector<EntryId> found(wanted.size());
    CHECK(index.find(0, wanted, true, found.data()) == wanted.size());
    CHECK(found == entries);
    const auto leased = pin(index, wanted);
    index.check_integrity(leased);
    index.unpin(leased);
    index.check_integrity({});
  }
}

TEST_CASE("the block used least recently goes first, and of a chain the one farthest from the start") {
  FullIndex index(8);
  const auto first = keys(4, 5), second = keys(4, 6), third = keys(5, 7);
  store(index, first);
  store(index, second);
  index.unpin(pin(index, std::span(first).first(3)));  // first[3] is not used again
  const Inserted done = index.insert(0, third, 5);
  CHECK(done.evicted == std::vector<BlockKey>{first[3], second[3], second[2], second[1], second[0]});
  CHECK(done.dropped == 0);
}

TEST_CASE("leased and pending blocks are never evicted, nor what is offered again") {
  FullIndex index(6);
  const auto held = keys(3, 8), offered = keys(6, 9);
  store(index, held);
  const auto leased = pin(index, held);
  store(index, std::span(offered).first(2));
  const Inserted done = index.insert(0, offered, 6);
  CHECK(done.known == 2);
  CHECK(done.positions == std::vector<uint32_t>{2});
  CHECK(done.dropped == 3);
  CHECK(done.evicted.empty());
  auto pinned = leased;
  pinned.insert(pinned.end(), done.entries.begin(), done.entries.end());
  index.check_integrity(pinned);
  CHECK_THROWS_AS(index.check_integrity(leased), ContractError);
}

TEST_CASE("finding and leasing in one pass is finding and then leasing") {
  FullIndex index(64);
  const auto chain = keys(20, 40), other = keys(5, 41);
  store(index, chain);
  store(index, std::span(other).first(4));
  std::vector<BlockKey> wanted(chain.begin(), chain.begin() + 12);
  wanted.insert(wanted.end(), other.begin(), other.end());
  const auto apart = pin(index, wanted);
  std::vector<EntryId> entries(wanted.size());
  std::vector<int32_t> slots(wanted.size()), slots_apart(wanted.size());
  REQUIRE(index.match_and_pin(0, wanted, entries.data(), slots.data()) == 16);
  entries.resize(16);
  CHECK(entries == apart);
  index.pin(entries, slots_apart.data());
  CHECK(slots == slots_apart);
  auto leases = apart;
  leases.insert(leases.end(), entries.begin(), entries.end());
  CHECK_THROWS_AS(index.check_integrity(leases), ContractError);
  leases.insert(leases.end(), entries.begin(), entries.end());
  index.check_integrity(leases);
}

TEST_CASE("what was found is leased as long as it is the same block, all of it or nothing") {
  FullIndex index(4);
  const auto chain = keys(4, 45), later = keys(2, 46);
  store(index, chain);
  const auto found = match(index, chain);
  std::vector<int32_t> slots(4), apart(4);
  index.pin_found(0, chain, found.data(), slots.data());
  index.pin(found, apart.data());
  CHECK(slots == apart);
  index.unpin(found);
  index.check_integrity(found);
  index.unpin(found);
  store(index, later);  // evicts the end of `chain`, and reuses its entries
  const auto left = match(index, chain);
  REQUIRE(left.size() == 2);
  CHECK(match(index, later) == std::vector<EntryId>{found[2], found[3]});
  CHECK_THROWS_AS(index.pin_found(0, chain, found.data(), slots.data()), ContractError);
  auto nothing = left;
  nothing.push_back(kNoEntry);
  CHECK_THROWS_AS(index.pin_found(0, std::span(chain).first(3), nothing.data(), slots.data()), ContractError);
  index.check_integrity({});
}

TEST_CASE("what was leased for keys counts as far as it is theirs, leased and ready") {
  FullIndex index(16);
  const auto wanted = keys(6, 1);
  store(index, std::span(wanted).first(3));
  auto entries = pin(index, std::span(wanted).first(3));
  const Inserted coming = index.insert(0, std::span(wanted).subspan(3, 2), 2, 71, 1);
  entries.insert(entries.end(), coming.entries.begin(), coming.entries.end());
  const std::span asked = std::span(wanted).first(5);
  CHECK(index.count_ready(0, asked, entries) == 3);
  const std::vector<uint8_t> ok = {1, 1};
  std::vector<uint8_t> changed(2);
  index.finish(coming.entries, ok.data(), changed.data());
  CHECK(index.count_ready(0, asked, entries) == 5);
  std::vector<BlockKey> others(asked.begin(), asked.end());
  others[2] = wanted[5];
  CHECK(index.count_ready(0, others, entries) == 2);
  entries[1] = kNoEntry;
  CHECK(index.count_ready(0, asked, entries) == 1);
  entries = pin(index, asked);
  index.unpin(entries);
  index.unpin(std::span(entries).subspan(4));
  CHECK(index.count_ready(0, asked, entries) == 4);
  index.remove(std::span(entries).first(1), changed.data());
  CHECK(index.count_ready(0, asked, entries) == 0);
  CHECK_THROWS_AS(index.count_ready(0, wanted, entries), ContractError);
  CHECK_THROWS_AS(index.count_ready(1, asked, entries), BlockRangeError);
}

TEST_CASE("evictions that meet leased blocks pass them over, and what was leased counts as just used") {
  FullIndex index(6);
  const auto old = keys(3, 42), young = keys(3, 43), fresh = keys(6, 44);
  store(index, old);
  store(index, young);
  const auto leased = pin(index, old);
  CHECK(index.insert(0, std::span(fresh).first(1), 1).evicted == std::vector<BlockKey>{young[2]});
  index.unpin(leased);
  const Inserted done = index.insert(0, std::span(fresh).subspan(1), 5);
  CHECK(done.evicted == std::vector<BlockKey>{young[1], young[0], old[2], old[1], old[0]});
}

TEST_CASE("a removed block is a miss at once and its slot is free after its last lease") {
  FullIndex index(4);
  const auto chain = keys(4, 10);
  store(index, chain);
  const auto leased = pin(index, std::span(chain).first(2));
  const auto again = pin(index, std::span(chain).first(1));
  std::vector<uint8_t> removed(2);
  CHECK(index.remove(leased, removed.data()) == 2);
  CHECK(index.remove(leased, removed.data()) == 0);
  CHECK(match(index, chain).empty());
  CHECK(index.free_slots(0) == 0);
  index.unpin(leased);
  CHECK(index.free_slots(0) == 1);
  index.unpin(again);
  CHECK(index.free_slots(0) == 2);
  index.check_integrity({});
}

TEST_CASE("all leases but those named end, and what was pending without one leaves") {
  BlockIndex index({8}, "lru", 42);
  index.grow(0, 8);
  const auto ready = keys(3, 1), coming = keys(2, 2), kept = keys(1, 3);
  const Inserted stored = index.insert(0, ready, 3);
  const std::vector<uint8_t> ok(3, 1);
  std::vector<uint8_t> published(3);
  index.finish(stored.entries, ok.data(), published.data());
  std::vector<int32_t> slots(3);
  index.pin(stored.entries, slots.data());
  index.pin(stored.entries, slots.data());
  const Inserted lost = index.insert(0, coming, 2, 0, 1);  // each entry is leased twice
  const Inserted named = index.insert(0, kept, 1);
  index.remove(std::span(stored.entries).first(1), published.data());
  CHECK(index.free_slots(0) == 2);

  const std::vector<EntryId> too_often = {named.entries[0], named.entries[0]};
  CHECK_THROWS_AS(index.keep_leases(too_often), ContractError);
  const std::vector<EntryId> never_leased = {kNoEntry};
  CHECK_THROWS_AS(index.keep_leases(never_leased), ContractError);
  const std::vector<EntryId> leased = {named.entries[0], stored.entries[1]};
  // The leases that end: 2 of the removed entry, 1 and 2 of the other two ready entries, and 4 of the two
  // entries in `lost`.
  CHECK(index.keep_leases(leased) == 2 + 1 + 2 + 4);
  index.check_integrity(leased);
  CHECK(index.free_slots(0) == 5);
  std::vector<EntryId> found(2);
  CHECK(index.find(0, coming, false, found.data()) == 0);
  CHECK(index.find(0, ready, true, std::vector<EntryId>(3).data()) == 2);
  CHECK(index.keep_leases(leased) == 0);
}

TEST_CASE("clear empties the index but for what is leased") {
  FullIndex index(8);
  const auto chain = keys(6, 11);
  store(index, chain);
  const auto leased = pin(index, std::span(chain).first(2));
  const Inserted pending = index.insert(0, keys(1, 12), 1);
  CHECK(index.clear() == 7);
  CHECK(index.size() == 0);
  std::vector<uint8_t> ok = {1}, published(1);
  index.finish(pending.entries, ok.data(), published.data());
  CHECK(published[0] == 0);
  index.unpin(leased);
  CHECK(index.free_slots(0) == 8);
  index.check_integrity({});
  store(index, chain);
  CHECK(match(index, chain).size() == 6);
}

TEST_CASE("groups have their own slots and never hit each other's blocks") {
  BlockIndex index({2, 3}, "lru", 1);
  index.grow(0, 2);
  index.grow(1, 3);
  const auto chain = keys(3, 13);
  CHECK(store(index, chain, 0).size() == 2);
  CHECK(store(index, chain, 1).size() == 3);
  CHECK(match(index, chain, 0).size() == 2);
  CHECK(match(index, chain, 1).size() == 3);
  index.check_integrity({});
  CHECK_THROWS_AS(match(index, chain, 2), BlockRangeError);
}

TEST_CASE("misuse is refused and changes nothing") {
  CHECK_THROWS_AS(BlockIndex({}, "lru", 1), ConfigError);
  CHECK_THROWS_AS(BlockIndex({4}, "random", 1), ConfigError);
  FullIndex index(4);
  CHECK_THROWS_AS(index.grow(0, 3), BlockRangeError);
  CHECK_THROWS_AS(index.grow(0, 5), BlockRangeError);
  const auto entries = store(index, keys(3, 14));
  std::vector<EntryId> with_bad = entries;
  with_bad.push_back(1'000'000);
  std::vector<int32_t> slots(with_bad.size());
  CHECK_THROWS_AS(index.pin(with_bad, slots.data()), ContractError);
  CHECK_THROWS_AS(index.unpin(entries), ContractError);
  index.check_integrity({});
}

TEST_CASE("a write's end that is wrong in one entry ends none") {
  FullIndex index(8);
  const auto chain = keys(3, 17);
  const std::vector<EntryId> ready = store(index, keys(1, 18));
  const std::vector<EntryId> pending = index.insert(0, chain, 3).entries;
  const std::vector<uint8_t> ok = {1, 0, 1, 1};
  std::vector<uint8_t> published(ok.size());
  for (const EntryId wrong : {ready[0], pending[0], EntryId{1'000'000}}) {  // no lease, or listed twice
    std::vector<EntryId> entries = pending;
    entries.push_back(wrong);
    CHECK_THROWS_AS(index.finish(entries, ok.data(), published.data(), 1), ContractError);
    index.check_integrity(pending);
    CHECK(match(index, chain).empty());
  }
  index.finish(pending, ok.data(), published.data(), 1);
  CHECK(published == std::vector<uint8_t>{1, 0, 1, 0});
  index.check_integrity({std::vector<EntryId>{pending[0], pending[2]}});
}
