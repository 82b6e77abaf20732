// The pages that a lookup over all tiers found for a request and leased: per group those that a hit needs, in
// whichever tier each of them lies.
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
  kComing = 1,  // in host memory, where an op that has not ended fills it
};

// Consecutive pages in one tier and one state.
struct FoundRun {
  int32_t tier;
  FoundState state;
  int32_t first;  // page of the group, counted from the start of the lookup
  int32_t count;

  int32_t end() const { return first + count; }
};

// The pages of one group. The arrays stay where they are for as long as the object lives.
struct FoundGroup {
  std::unique_ptr<EntryId[]> entries;  // of the pages from `first` on; kNoEntry for one that is not needed
  std::unique_ptr<int32_t[]> slots;
  size_t first = 0;
  size_t pages = 0;  // up to the last one, including those before `first`
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
  kHeld,      // whoever calls `release`
  kReleased,  // nobody: they have ended
  kDetached,  // whoever took the pages over, through the tiers' own indexes
};

// What any lookup found. Dropping it while its lease is held leaves the pages leased.
struct FoundPages {
  uint64_t lookup = 0;  // number of the TierLookup that made it: others have other tiers
  FoundLease lease = FoundLease::kHeld;
  bool cut = false;  // there is more, and no room for it
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

  // The caller has taken the pages over, and ends their leases through the tiers' own indexes.
  void detach() {
    check_held("detach");
    lease = FoundLease::kDetached;
  }
};

// A prefix of whole blocks. Made by TierLookup::look.
struct Found : FoundPages {
  size_t blocks = 0;        // of every group, from the start of the lookup on
  size_t ready_blocks = 0;  // the leading ones that are ready in host memory
};

// Lengths that every group can restore, each by its own rule. Made by BoundaryLookup::look.
struct FoundLengths : FoundPages {
  uint64_t start = 0;             // tokens that the engine has itself
  std::vector<uint64_t> lengths;  // in tokens, the longest first; the pages that any needs are leased
  bool ready = false;             // all leased pages are ready in host memory
  // Tokens up to which the groups of full attention have all pages: other requests were the same up to there,
  // even if the other groups have no page at which a hit could end. `start` if there is no such group.
  uint64_t shared = 0;
};

}  // namespace flexkv
