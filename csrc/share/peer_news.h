// What a directory of peers has learned about their pages and its unit has not processed yet.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "index/block_key.h"
#include "share/slot_board.h"

namespace flexkv {

// A page of one KV group.
struct PageName {
  BlockKey key;
  uint32_t group;
  bool operator==(const PageName&) const = default;
};
struct NameHash {
  size_t operator()(const PageName& name) const { return name.key.low ^ name.group; }
};

// A page that the first peer to have it gained, or the last one lost.
struct PeerNews {
  BlockKey key;
  uint32_t group;
  uint32_t tokens;
  uint64_t expiry;  // Unix seconds; 0 for never
  bool there;
};

// Keeps one record per page, which sums up all news of the page. So the thread that adds news does this work,
// and the thread that takes it has less to do. Thread-safe: one thread adds news, another takes it.
class PendingNews {
 public:
  void tell(const RowFacts& facts, bool there);
  // Moves the records of up to `most` pages to `out`, in the order in which the pages were last reported:
  // first pages that were lost, then those that are there now. A page that was lost and came back, perhaps
  // with other tokens, is among both. Returns how many records were moved.
  size_t take(size_t most, std::vector<PeerNews>& out);
  // The same for only the records of these pages. A key without a record takes some nanoseconds.
  size_t take_of(std::span<const BlockKey> keys, uint32_t group, std::vector<PeerNews>& out);
  // Unit: pages.
  size_t size() const { return size_.load(std::memory_order_acquire); }

 private:
  struct Record {
    PeerNews last;
    bool went;    // since the page was taken the last time
    bool passed;  // taken, or replaced by a later record
  };

  void pass(Record& record, std::vector<Record>& moved);
  void end_take(std::vector<Record>& moved, std::vector<PeerNews>& out);
  void compact();
  void mark(const PageName& name);
  bool is_marked(const PageName& name) const;

  // Bits by hash, of pages with a record and of some that had one: a lookup of keys that no peer has touches
  // only these 32 KiB, which stay in a core's cache.
  static constexpr size_t kMarks = size_t{1} << 18;

  mutable std::mutex mutex_;  // guards the members below
  std::vector<Record> records_;
  size_t first_ = 0;                                   // all before it are done
  std::unordered_map<PageName, size_t, NameHash> at_;  // the page's record that is not done
  std::array<uint64_t, kMarks / 64> marks_{};
  std::atomic<size_t> size_{0};
};

}  // namespace flexkv
