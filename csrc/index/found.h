// The result types of a lookup over all tiers. They list the pages that the lookup found and leased for a
// request: for each KV group, the pages that a hit needs, and for each page, the tier that has the page.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/entry.h"

namespace flexkv {

enum class FoundState : int32_t {
  kReady = 0,   // the page is complete and visible in its tier
  kComing = 1,  // the page has a slot in host memory that an op is still filling
};

// Consecutive pages of one group that are in the same tier and the same state.
struct FoundRun {
  int32_t tier;
  FoundState state;
  // Number of the run's first page. Page 0 is the group's first page after the token at which the lookup
  // starts.
  int32_t first;
  int32_t count;  // number of pages

  int32_t end() const { return first + count; }
};

// The pages of one group that a lookup found. After the lookup has returned, the addresses of the arrays do
// not change.
struct FoundGroup {
  // One per page, beginning with page `first`; kNoEntry if the page is not needed.
  std::unique_ptr<EntryId[]> entries;
  // One per page, beginning with page `first`; -1 if the page is not needed.
  std::unique_ptr<int32_t[]> slots;
  size_t first = 0;            // number of the first page in the arrays
  size_t pages = 0;            // number of the last page plus one; includes the pages before `first`
  std::vector<FoundRun> runs;  // the needed pages, in ascending order

  std::span<const EntryId> entries_of(const FoundRun& run) const {
    return {entries.get() + (static_cast<size_t>(run.first) - first), static_cast<size_t>(run.count)};
  }
  // Returns the length of the first run if its pages are ready in host memory; otherwise 0.
  size_t ready_pages() const {
    const bool any = !runs.empty() && runs[0].tier == 0 && runs[0].state == FoundState::kReady;
    return any ? static_cast<size_t>(runs[0].count) : 0;
  }
};

// A page that a lookup did not use because the page has expired. The owner of the page's tier must remove the
// page.
struct ExpiredPage {
  int32_t tier;
  uint32_t group;
  EntryId entry;

  auto operator<=>(const ExpiredPage&) const = default;
};

// Whether the pages of a lookup are still leased, and how the leases end.
enum class FoundLease : uint8_t {
  kHeld,      // the pages are leased; the lookup's `release` ends the leases
  kReleased,  // the leases have ended
  kDetached,  // a caller owns the leases, and ends them with calls to the tiers' indexes
};

// The pages that a lookup found. If the object is destroyed while `lease` is kHeld, the pages stay leased.
struct FoundPages {
  // Number of the TierLookup that found the pages. Only that TierLookup can release them.
  uint64_t lookup = 0;
  FoundLease lease = FoundLease::kHeld;
  // Whether the limit on pages, LookupTerms::room_pages, ended the prefix, or limited the longest hit.
  bool cut = false;
  std::vector<FoundGroup> groups;  // one per KV group
  // Expired pages that the lookup found, in ascending order, each listed once.
  std::vector<ExpiredPage> expired;

  // Throws ContractError if the lease is not kHeld. `call`: the caller's name, for the error message.
  void check_held(const char* call) const {
    if (lease == FoundLease::kHeld) return;
    throw ContractError(std::string(call) + ": the pages were " +
                        (lease == FoundLease::kReleased ? "released" : "detached") + " before");
  }

  // Whether all pages are ready in host memory.
  bool all_in_host() const {
    for (const FoundGroup& group : groups) {
      for (const FoundRun& run : group.runs) {
        if (run.tier != 0 || run.state != FoundState::kReady) return false;
      }
    }
    return true;
  }

  // Passes the leases to the caller, who must end them with calls to the tiers' indexes.
  void detach() {
    check_held("detach");
    lease = FoundLease::kDetached;
  }
};

// A prefix of complete blocks that TierLookup::look found.
struct Found : FoundPages {
  size_t blocks = 0;        // length of the prefix in blocks, the same in every group
  size_t ready_blocks = 0;  // number of leading blocks that are ready in host memory in every group
};

// Hit lengths for which every group has the pages that its own rule requires. BoundaryLookup::look finds
// them.
struct FoundLengths : FoundPages {
  uint64_t start = 0;  // number of tokens that the inference engine already has
  // Hit lengths in tokens, the longest first. All pages that these hits need are leased.
  std::vector<uint64_t> lengths;
  bool ready = false;  // whether all leased pages are ready in host memory
  // The number of tokens for which the groups with full attention have all pages; `start` if there is no such
  // group. So an earlier request had the same first `shared` tokens, even if some other group lacks a page
  // that a hit of this length would need.
  uint64_t shared = 0;
};

}  // namespace flexkv
