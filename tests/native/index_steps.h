// Helpers for the tests of the block index.
#pragma once
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "index/block_index.h"

namespace flexkv {

inline std::vector<BlockKey> keys(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<BlockKey> made(count);
  for (BlockKey& key : made) key = {random(), random()};
  return made;
}

// Inserts the blocks `offered`, and publishes those that were not in the index before.
inline Inserted insert_and_publish(BlockIndex& index, std::span<const BlockKey> offered, uint32_t group = 0) {
  Inserted done = index.insert(group, offered, offered.size());
  const std::vector<uint8_t> ok(done.entries.size(), 1);
  std::vector<uint8_t> published(done.entries.size());
  index.finish(done.entries, ok.data(), published.data());
  CHECK(published == ok);
  return done;
}

inline std::vector<EntryId> store(BlockIndex& index, std::span<const BlockKey> offered, uint32_t group = 0) {
  return insert_and_publish(index, offered, group).entries;
}

inline std::vector<EntryId> match(const BlockIndex& index, std::span<const BlockKey> wanted,
                                  uint32_t group = 0) {
  std::vector<EntryId> entries(wanted.size());
  entries.resize(index.match_prefix(group, wanted, entries.data()));
  return entries;
}

// Pins and unpins the blocks `wanted`, as for a request that found all of them and has ended. `hit`: whether
// the request used the blocks.
inline void use(BlockIndex& index, std::span<const BlockKey> wanted, bool hit = true) {
  std::vector<EntryId> entries(wanted.size());
  std::vector<int32_t> slots(wanted.size());
  REQUIRE(index.match_and_pin(0, wanted, entries.data(), slots.data()) == wanted.size());
  index.unpin(entries, Use{.hit = hit});
}

}  // namespace flexkv
