// A lookup over all tiers. It finds the longest prefix of a request for which every KV group has all pages,
// and leases each page in the tier where it was found. Each tier has its own index, because a walk along a
// chain is fast only if the chain's entries are contiguous in memory.
//
// This lookup is for groups with full attention: block i is useful only with all blocks before it.
// BoundaryLookup handles groups with other rules. Like the indexes, this class is not thread-safe.
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

// The limits of one lookup.
struct LookupTerms {
  size_t room_pages = 0;    // maximum number of pages to find, counted over all groups
  uint32_t tiers_mask = 0;  // the tiers to search: the bit with the number of the tier is set
  uint64_t now_s = 0;  // current Unix time in seconds; blocks that expire at or before this time are misses
  bool coming = true;  // whether host pages that an op is still filling count as found
};

class TierLookup {
 public:
  static constexpr size_t kMaxTiers = 32;  // the number of bits in `tiers_mask`

  // `presences`: the index of every tier, in the order in which lookups search the tiers. Host memory is the
  // first tier. Throws ConfigError if there are no tiers or too many, and ContractError if an index occurs
  // twice or does not have `groups` groups.
  TierLookup(std::vector<std::shared_ptr<BlockIndex>> presences, size_t groups);

  size_t tiers() const { return tiers_.size(); }
  size_t groups() const { return groups_; }
  BlockIndex& index_of(size_t tier) const { return *tiers_[tier]; }
  bool uses(const LookupTerms& terms, size_t tier) const { return (terms.tiers_mask >> tier & 1) != 0; }
  uint64_t number() const { return number_; }
  // Throws ContractError if `terms.tiers_mask` has the bit of a tier that does not exist, or if `keys` does
  // not have one element per group.
  void check(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms) const;

  // Finds the pages of the longest prefix, leases them and writes them to `found`. `keys`: for each group,
  // the keys after the token at which the lookup starts.
  //
  // The lookup searches host memory first. At a page that host memory lacks, it continues in the first tier
  // that has the page. It stays in that tier as long as the tier has the following pages, and then returns to
  // host memory. A host page that is being stored ends the prefix: the page may never become ready, and it
  // cannot be fetched while the store runs. Throws ContractError, and leases nothing, if the arguments are
  // invalid or a page has too many leases.
  void look(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, Found& found);

  // Looks up the leading pages of one group; BoundaryLookup calls this for groups with full attention. Leases
  // the pages, records them in `found.groups[group]`, and appends expired pages to `found.expired`.
  void look_in_group(uint32_t group, std::span<const BlockKey> keys, const LookupTerms& terms,
                     FoundPages& found);

  // Undoes the leases on page `from` of `group` and on all later pages. Precondition: the current lookup has
  // taken these leases, and has not returned its result yet.
  void take_back(FoundGroup& group, size_t from);

  // Ends the leases on the pages of `group` outside [first, end). If a lease could not be ended, returns the
  // message of one such error; otherwise an empty string.
  std::string unpin_all_but(FoundGroup& group, size_t first, size_t end);

  // Throws ContractError if a different TierLookup object found the pages in `found`.
  void check_made_here(const FoundPages& found) const;

  // Keeps the leases on the first `blocks` blocks and ends the leases on all later ones. Throws
  // BlockRangeError if the lookup found fewer blocks.
  void trim(Found& found, size_t blocks);

  // Ends all leases. If other code has already ended one of the leases, ends the leases of all other runs and
  // then throws ContractError.
  void release(Found& found);
  void release_pages(FoundPages& found);

  // Returns how many of the leading blocks are ready in host memory at the time of the call.
  size_t count_ready(const Found& found) const;

  // Writes a number for each key. If a tier in the mask has the key's block, ready and not expired, the
  // number is 1 plus the number of the first such tier. Otherwise the number is 0.
  void present(uint32_t group, std::span<const BlockKey> keys, uint32_t tiers_mask, uint64_t now_s,
               uint8_t* out);

 private:
  struct Search;  // the state of the search in one group during a lookup

  bool is_masked(uint32_t mask, size_t tier) const { return (mask >> tier & 1) != 0; }
  void check_mask(uint32_t mask) const;
  // Both overloads lease the next run of pages and return the number of its pages, or 0 if there is no run.
  // The first overload takes the run from the first tier that has one. The second overload takes it from the
  // given tier, and only pages in the given state.
  size_t take_run(Search& search);
  size_t take_run(Search& search, size_t tier, FoundState state);
  // Probes the next kWindow keys in all tiers and leases the pages up to the first miss. Returns the number
  // of these pages.
  size_t take_window(Search& search);
  // Whether every group has the page of key number `at` in some tier.
  bool has_next(std::span<const std::span<const BlockKey>> keys, const LookupTerms& terms, size_t at) const;
  // Ends the leases on page `from` of `group` and on all later pages. If a lease could not be ended, returns
  // the message of one such error; otherwise an empty string.
  std::string unpin(FoundGroup& group, size_t from);

  static constexpr size_t kWindow = 512;

  std::vector<std::shared_ptr<BlockIndex>> tiers_;
  size_t groups_;
  uint64_t number_;
  // Buffers for one window. `missing_` has the keys of those pages that have not been found in any tier yet;
  // `candidates_` has the entries that `find` returned.
  std::array<BlockKey, kWindow> missing_;
  std::array<EntryId, kWindow> candidates_;
};

}  // namespace flexkv
