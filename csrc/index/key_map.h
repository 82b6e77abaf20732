// A flat hash map from keys to entries: open addressing with linear probing, in an array of 8-byte places.
// The array is never more than a quarter full. So most probes end at the first or the second place, and the
// CPU predicts the branches of probes well.
//
// A place is one element of the array. It holds 32 bits of the key's hash and the entry's number. The top
// bits of the hash give the key's home, the place at which a probe starts. So a probe that misses reads no
// entry. A removal reads no entry, either: it moves the contents of the following places back, and leaves no
// tombstones.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "index/entry.h"
#include "index/huge_array.h"

namespace flexkv {

class KeyMap {
 public:
  // `seed` makes the positions of keys in the array unpredictable. Without a secret seed, an attacker who
  // chooses prompts could make the prompts' keys collide. Throws CapacityError if `max_entries` is too large.
  KeyMap(size_t max_entries, uint64_t seed)
      : places_(capacity_for(max_entries)),
        shift_(32 - std::countr_zero(places_.size())),
        mask_(places_.size() - 1),
        seed_(seed) {}

  // Returns the hash of a key. All other calls take this hash instead of the key.
  uint32_t hash(const BlockKey& key) const {
    const auto product = static_cast<unsigned __int128>(key.low ^ seed_) * (key.high | 1);
    const uint64_t folded = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    return static_cast<uint32_t>(folded * 0x9E3779B97F4A7C15ULL >> 32);
  }

  void prefetch(uint32_t hash) const { places_.prefetch(home(hash)); }

  // Prefetches the places that `erase` reads: the home of the hash, and the place after it. In one of eight
  // cases, the place after the home is in the next cache line.
  void prefetch_erase(uint32_t hash) const {
    places_.prefetch(home(hash));
    places_.prefetch((home(hash) + 1) & mask_);
  }

  // Returns the first entry with this hash, or kNoEntry. Does not read the entry itself, so that the caller
  // can prefetch the entry before reading it.
  EntryId candidate(uint32_t hash) const {
    return find(hash, [](EntryId) { return true; });
  }

  // Returns the entry with this hash for which `same(entry)` is true, or kNoEntry.
  template <class Same>
  EntryId find(uint32_t hash, Same same) const {
    for (size_t at = home(hash);; at = (at + 1) & mask_) {
      const uint64_t place = places_[at];
      if (place == kEmpty) return kNoEntry;
      if (hash_of(place) == hash && same(entry_of(place))) return entry_of(place);
    }
  }

  // Does what `find` does. If there is no such entry, also sets `place` to the place for a new entry with
  // this hash, for a call of `put`. That place is valid until the map changes.
  template <class Same>
  EntryId find_or_place(uint32_t hash, Same same, size_t& place) const {
    for (place = home(hash);; place = (place + 1) & mask_) {
      const uint64_t found = places_[place];
      if (found == kEmpty) return kNoEntry;
      if (hash_of(found) == hash && same(entry_of(found))) return entry_of(found);
    }
  }

  // Adds an entry at a place that `find_or_place` found. Precondition: the map has fewer than `max_entries`
  // entries.
  void put(size_t place, uint32_t hash, EntryId entry) {
    places_[place] = uint64_t{hash} << 32 | (entry + 1);
    ++size_;
  }

  // Removes an entry. Returns false if the entry is not in the map.
  bool erase(uint32_t hash, EntryId entry) {
    size_t hole = home(hash);
    while (places_[hole] != kEmpty && (hash_of(places_[hole]) != hash || entry_of(places_[hole]) != entry)) {
      hole = (hole + 1) & mask_;
    }
    if (places_[hole] == kEmpty) return false;
    for (size_t at = (hole + 1) & mask_; places_[at] != kEmpty; at = (at + 1) & mask_) {
      const size_t distance_from_home = (at - home(hash_of(places_[at]))) & mask_;
      if (distance_from_home < ((at - hole) & mask_)) continue;
      places_[hole] = places_[at];
      hole = at;
    }
    places_[hole] = kEmpty;
    --size_;
    return true;
  }

  void clear() {
    places_.zero();
    size_ = 0;
  }

  size_t size() const { return size_; }

  // Calls visit(hash, entry) for every entry in the map.
  template <class Visit>
  void for_each(Visit visit) const {
    for (size_t at = 0; at < places_.size(); ++at) {
      if (places_[at] != kEmpty) visit(hash_of(places_[at]), entry_of(places_[at]));
    }
  }

 private:
  static constexpr uint64_t kEmpty = 0;
  static constexpr size_t kMaxEntries = size_t{1} << 30;
  static constexpr size_t kMinPlaces = 16;
  // The minimum number of places per entry; the total number of places is rounded up to a power of two. The
  // value was chosen by measuring inserts and evictions with 2 and with 4 places per entry, and with 1M
  // blocks in the cache.
  static constexpr size_t kPlacesPerEntry = 4;

  static size_t capacity_for(size_t max_entries) {
    if (max_entries > kMaxEntries) {
      throw CapacityError("the block index was asked for " + std::to_string(max_entries) +
                          " blocks; allowed are up to 2**30");
    }
    return std::bit_ceil(std::max(kPlacesPerEntry * max_entries, kMinPlaces));
  }

  size_t home(uint32_t hash) const { return static_cast<size_t>(uint64_t{hash} >> shift_); }
  static uint32_t hash_of(uint64_t place) { return static_cast<uint32_t>(place >> 32); }
  static EntryId entry_of(uint64_t place) { return static_cast<EntryId>(place) - 1; }

  HugeArray<uint64_t> places_;
  int shift_;
  size_t mask_;
  uint64_t seed_;
  size_t size_ = 0;
};

}  // namespace flexkv
