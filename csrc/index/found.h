// What a lookup over all tiers found of a request and leased: per group the pages that a hit needs, wherever
// each of them lies.
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

// Pages that follow each other and lie in one tier, in one state.
struct FoundRun {
  int32_t tier;
  FoundState state;
  int32_t first;  // page of the group, from the start of the lookup on
  int32_t count;

  int32_t end() const { return first + count; }
};

// The pages of one group. The arrays stay where they are for as long as the object lives.
struct FoundGroup {
  std::unique_ptr<EntryId[]> entries;  // of the pages from `first` on; kNoEntry where none is needed
  std::unique_ptr<int32_t[]> slots;
  size_t first = 0;
  size_t pages = 0;  // up to their end, those before `first` too
  std::vector<FoundRun> runs;

  std::span<const EntryId> entries_of(const FoundRun& run) const {
    return {entries.get() + (static_cast<size_t>(run.first) - first), static_cast<size_t>(run.count)};
  }
  // Leading pages that are ready in host memory.
  size_t ready_pages() const {
    const bool any = !runs.empty() && runs[0].tier == 0 && runs[0].state == FoundState::kReady;
    return any ? static_cast<size_t>(runs[0].count) : 0;
  }
};

// A page that is a miss because its time is over; its owner has to remove it.
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

// What any lookup found. One that is dropped while its lease is held leaves the pages leased.
struct FoundPages {
  uint64_t lookup = 0;  // number of the lookup that made it: others cannot tell its tiers
  FoundLease lease = FoundLease::kHeld;
  bool cut = false;  // there is more, and no room for it
  std::vector<FoundGroup> groups;
  std::vector<ExpiredPage> expired;  // ascending, each once

  // Throws ContractError unless whoever calls `release` still holds the lease.
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

  // Whoever calls it has taken the pages over, and ends their leases through the tiers' own indexes.
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
  std::vector<uint64_t> lengths;  // in tokens, the longest first; all that any of them needs is leased
  bool ready = false;             // all of it is in host memory
  // Tokens up to which the groups of full attention have all pages: so far other requests were the same, also
  // where the other groups have nothing that a hit could end with. `start` without such a group.
  uint64_t shared = 0;
};

}  // namespace flexkv
