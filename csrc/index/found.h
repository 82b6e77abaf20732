// The pages that a lookup over all tiers found and leased for a request: for each group the pages that a hit
// needs, each in the tier that has it.
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
  kReady = 0,   // may be used as it is
  kComing = 1,  // in host memory, but an op is still filling it
};

// Consecutive pages in one tier and one state.
struct FoundRun {
  int32_t tier;
  FoundState state;
  int32_t first;  // page number in the group, counted from the start of the lookup
  int32_t count;

  int32_t end() const { return first + count; }
};

// The pages of one group. The arrays do not move while the object lives.
struct FoundGroup {
  std::unique_ptr<EntryId[]> entries;  // one per page from `first` on; kNoEntry for a page that is not needed
  std::unique_ptr<int32_t[]> slots;
  size_t first = 0;
  size_t pages = 0;  // number of the last page plus one, so including those before `first`
  std::vector<FoundRun> runs;

  std::span<const EntryId> entries_of(const FoundRun& run) const {
    return {entries.get() + (static_cast<size_t>(run.first) - first), static_cast<size_t>(run.count)};
  }
  // How many leading pages are ready in host memory.
  size_t ready_pages() const {
    const bool any = !runs.empty() && runs[0].tier == 0 && runs[0].state == FoundState::kReady;
    return any ? static_cast<size_t>(runs[0].count) : 0;
  }
};

// A page that is a miss because it has expired; its owner has to remove it.
struct ExpiredPage {
  int32_t tier;
  uint32_t group;
  EntryId entry;

  auto operator<=>(const ExpiredPage&) const = default;
};

// Who ends the leases on the pages.
enum class FoundLease : uint8_t {
  kHeld,      // the caller of `release`
  kReleased,  // they have ended
  kDetached,  // the caller that took the pages over, through the tiers' indexes
};

// What a lookup found. Dropping it while its lease is held leaves the pages leased.
struct FoundPages {
  uint64_t lookup = 0;  // number of the TierLookup that made it; another one has other tiers
  FoundLease lease = FoundLease::kHeld;
  bool cut = false;  // there are more pages, but no room for them
  std::vector<FoundGroup> groups;
  std::vector<ExpiredPage> expired;  // ascending, each once

  // Throws ContractError unless the lease is still held. `call` is for the message.
  void check_held(const char* call) const {
    if (lease == FoundLease::kHeld) return;
    throw ContractError(std::string(call) + ": the pages were " +
                        (lease == FoundLease::kReleased ? "released" : "detached") + " before");
  }

  bool all_in_host() const {
    for (const FoundGroup& group : groups) {
      for (const FoundRun& run : group.runs) {
        if (run.tier != 0 || run.state != FoundState::kReady) return false;
      }
    }
    return true;
  }

  // The caller takes the pages over, and will end their leases through the tiers' own indexes.
  void detach() {
    check_held("detach");
    lease = FoundLease::kDetached;
  }
};

// A prefix of whole blocks. Made by TierLookup::look.
struct Found : FoundPages {
  size_t blocks = 0;        // in every group, counted from the start of the lookup
  size_t ready_blocks = 0;  // how many leading ones are ready in host memory
};

// Lengths that every group can restore, each by its own rule. Made by BoundaryLookup::look.
struct FoundLengths : FoundPages {
  uint64_t start = 0;             // tokens that the engine already has
  std::vector<uint64_t> lengths;  // in tokens, the longest first; the pages that any of them needs are leased
  bool ready = false;             // all leased pages are ready in host memory
  // The number of tokens for which the groups of full attention have all pages. Earlier requests equalled
  // this one up to there, even if another group lacks the page at which a hit could end. `start` if there is
  // no such group.
  uint64_t shared = 0;
};

}  // namespace flexkv
