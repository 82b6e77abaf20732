// Looks up a request over all tiers: finds the longest prefix that every group can restore, and leases each
// page in the tier where it was found. Each tier has an index of its own, because a walk along a chain is
// fast only if its entries are contiguous in memory.
//
// Groups restore whole prefixes: block i is useful only with all blocks before it. Not thread-safe, like the
// indexes.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "index/block_index.h"
#include "index/found.h"

namespace flexkv {

// The room, tiers and time that a lookup may use.
struct LookupTerms {
  size_t room_pages = 0;    // the most pages to find, over all groups
  uint32_t tiers_mask = 0;  // bit t: tier t
  uint64_t now_s = 0;       // Unix time; blocks expired by then are misses
  bool coming = true;       // whether host pages that ops are filling count
};

class TierLookup {
 public:
  static constexpr size_t kMaxTiers = 32;  // bits of a mask

  // `presences`: the index of every tier in the order of lookups, host memory first. Throws ConfigError for
  // none or too many, ContractError for an index that occurs twice or has another number of groups.
  TierLookup(std::vector<std::shared_ptr<BlockIndex>> presences, size_t groups);

  size_t tiers() const { return tiers_.size(); }
  size_t groups() const { return groups_; }
  BlockIndex& index_of(size_t tier) const { return *tiers_[tier]; }
  bool uses(const LookupTerms& terms, size_t tier) const { return (terms.tiers_mask >> tier & 1) != 0; }
  uint64_t number() const { return number_; }
  // Throws ContractError if the mask names a tier that does not exist, or if `keys` has another number of
  // groups.
  void check(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms) const;

  // Finds pages and leases them. `keys`: for each group, the keys after the start of the lookup.
  //
  // At each page host memory is searched first. If it lacks the page, the first tier that has it continues as
  // far as it can, and then host memory is searched again. A host page that is being stored ends the prefix:
  // its content may never be published, and nothing else may fill it meanwhile. Throws ContractError; then
  // nothing is leased.
  void look(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, Found& found);

  // Looks up the leading pages of one group, for lookups with other rules. Leases the pages and records them
  // in `found.groups[group]` and `found.expired`.
  void look_in_group(uint32_t group, std::span<const BlockKey> keys, const LookupTerms& terms,
                     FoundPages& found);

  // Undoes the leases that the current lookup has taken on the pages of `group` from page `from` on, before
  // its result is returned.
  void take_back(FoundGroup& group, size_t from);

  // Ends the leases on the pages of `group` outside [first, end). Returns an error about one of them; empty
  // on success.
  std::string unpin_all_but(FoundGroup& group, size_t first, size_t end);

  // Throws ContractError if another TierLookup found the pages.
  void check_made_here(const FoundPages& found) const;

  // Ends the leases on all but the first `blocks` blocks. Throws BlockRangeError for more than were found.
  void trim(Found& found, size_t blocks);

  // Ends all leases. If one of them was already ended elsewhere, it still ends the others and then throws
  // ContractError.
  void release(Found& found);
  void release_pages(FoundPages& found);

  // How many leading blocks are ready in host memory now.
  size_t count_ready(const Found& found) const;

  // Writes for each key 1 plus the number of the first tier in the mask in which it is ready and not expired;
  // 0 for none.
  void present(uint32_t group, std::span<const BlockKey> keys, uint32_t tiers_mask, uint64_t now_s,
               uint8_t* out);

 private:
  struct Search;  // one group of one lookup under way

  bool is_masked(uint32_t mask, size_t tier) const { return (mask >> tier & 1) != 0; }
  void check_mask(uint32_t mask) const;
  size_t take_run(Search& search);
  size_t take_run(Search& search, size_t tier, FoundState state);
  size_t take_window(Search& search);
  // Whether, for every group, some tier has the page of key number `at`.
  bool has_next(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, size_t at) const;
  // Ends the leases on the pages from page `from` on. Returns an error about one of them; empty on success.
  std::string unpin(FoundGroup& group, size_t from);

  static constexpr size_t kWindow = 512;

  std::vector<std::shared_ptr<BlockIndex>> tiers_;
  size_t groups_;
  uint64_t number_;
  // For one window: the keys that no tier searched so far has, and the entries that `find` returned for them.
  std::array<BlockKey, kWindow> missing_;
  std::array<EntryId, kWindow> candidates_;
};

}  // namespace flexkv
