// One lookup over all tiers: the longest prefix that every group can restore from them, leased page by page
// in the tier where it was found. Each tier keeps an index of its own, because a chain is walked fast only
// where its entries lie in sequence.
//
// Groups restore whole prefixes: block i is of use only with all blocks before it. Not thread-safe, as the
// indexes are not.
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

// What a lookup may use.
struct LookupTerms {
  size_t room_pages = 0;    // over all groups
  uint32_t tiers_mask = 0;  // bit t: tier t
  uint64_t now_s = 0;       // Unix time; what has expired by then is a miss
  bool coming = true;       // host pages that ops are filling count
};

class TierLookup {
 public:
  static constexpr size_t kMaxTiers = 32;  // bits of a mask

  // `presences`: of every tier in the order of lookups, host memory first. Throws ConfigError for none or too
  // many, ContractError for one that is named twice or has another number of groups.
  TierLookup(std::vector<std::shared_ptr<BlockIndex>> presences, size_t groups);

  size_t tiers() const { return tiers_.size(); }
  size_t groups() const { return groups_; }
  BlockIndex& index_of(size_t tier) const { return *tiers_[tier]; }
  bool uses(const LookupTerms& terms, size_t tier) const { return (terms.tiers_mask >> tier & 1) != 0; }
  uint64_t number() const { return number_; }
  // Throws ContractError for a mask that names other tiers, and for keys of another number of groups.
  void check(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms) const;

  // Finds and leases. `keys`: per group, those after the start of the lookup.
  //
  // At each page host memory comes first. Where it ends, the first tier that has the page goes on for as long
  // as it can, and then host memory is asked again. A host page that is being stored ends the prefix: what it
  // will hold may never be published, and nothing else may fill it meanwhile. Throws ContractError; then
  // nothing is leased.
  void look(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, Found& found);

  // The same of the leading pages of one group, for lookups that know more rules; leased, and noted in
  // `found.groups[group]` and `found.expired`.
  void look_in_group(uint32_t group, std::span<const BlockKey> keys, const LookupTerms& terms,
                     FoundPages& found);

  // Takes back the leases of a lookup under way on the pages of `group` from `from` on: nobody has seen them.
  void take_back(FoundGroup& group, size_t from);

  // Ends the leases on the pages of `group` outside [first, end). Returns what was wrong with one, or
  // nothing.
  std::string unpin_all_but(FoundGroup& group, size_t first, size_t end);

  // Throws ContractError for what another lookup found.
  void check_made_here(const FoundPages& found) const;

  // Ends the leases on all but the first `blocks` blocks. Throws BlockRangeError for more than were found.
  void trim(Found& found, size_t blocks);

  // Ends the leases. All of them, even if one of them was ended by somebody else: then throws ContractError.
  void release(Found& found);
  void release_pages(FoundPages& found);

  // The leading blocks that are ready in host memory now.
  size_t count_ready(const Found& found) const;

  // Per key, the first tier in the mask where it is ready and has not expired, plus 1; 0 for none.
  void present(uint32_t group, std::span<const BlockKey> keys, uint32_t tiers_mask, uint64_t now_s,
               uint8_t* out);

 private:
  struct Search;  // one group of one lookup under way

  bool is_masked(uint32_t mask, size_t tier) const { return (mask >> tier & 1) != 0; }
  void check_mask(uint32_t mask) const;
  size_t take_run(Search& search);
  size_t take_run(Search& search, size_t tier, FoundState state);
  size_t take_window(Search& search);
  // Whether each group has its next key, looked for by itself.
  bool has_next(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, size_t at) const;
  // Ends the leases on them for good. Returns what was wrong with one, or nothing.
  std::string unpin(FoundGroup& group, size_t from);

  static constexpr size_t kWindow = 512;

  std::vector<std::shared_ptr<BlockIndex>> tiers_;
  size_t groups_;
  uint64_t number_;
  // Of a window: the keys that no tier so far has, and what `find` gave for them.
  std::array<BlockKey, kWindow> missing_;
  std::array<EntryId, kWindow> candidates_;
};

}  // namespace flexkv
