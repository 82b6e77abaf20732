// Collects news about peers' pages until the unit takes the news.
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

// Identifies a page: by its key and its KV group.
struct PageName {
  BlockKey key;
  uint32_t group;
  bool operator==(const PageName&) const = default;
};
struct NameHash {
  size_t operator()(const PageName& name) const { return name.key.low ^ name.group; }
};

// News about one page. If `there` is true, a peer has the page and no peer had it before. Otherwise no peer
// has the page any more.
struct PeerNews {
  BlockKey key;
  uint32_t group;
  uint32_t tokens;
  uint64_t expiry;  // Unix seconds; 0 for never
  bool there;
};

// Keeps one record per page, which combines all pending news of the page. The news is combined by the thread
// that adds it, so that the thread that takes it has less work. Thread-safe: one thread adds news, and
// another thread takes it.
class PendingNews {
 public:
  void tell(const RowFacts& facts, bool there);
  // Takes the records of up to `most` pages, in the order in which news of these pages was last added.
  // Replaces the content of `out`. `out` then begins with the pages that were lost; after them come the pages
  // that a peer has. If a page was lost and a peer has it again, perhaps with a different number of tokens,
  // the page is in both parts. Returns how many records were taken.
  size_t take(size_t most, std::vector<PeerNews>& out);
  // Does the same as `take`, without a limit, for the pages of `group` that have these keys. For a key
  // without a record, this takes only some nanoseconds.
  size_t take_of(std::span<const BlockKey> keys, uint32_t group, std::vector<PeerNews>& out);
  // How many pages have a record.
  size_t size() const { return size_.load(std::memory_order_acquire); }

 private:
  struct Record {
    PeerNews last;
    bool went;    // whether the page was lost since its news was last taken
    bool passed;  // whether the record was taken, or replaced by a later record
  };

  void pass(Record& record, std::vector<Record>& moved);
  void end_take(std::vector<Record>& moved, std::vector<PeerNews>& out);
  void compact();
  void mark(const PageName& name);
  bool is_marked(const PageName& name) const;

  // The number of bits in `marks_`, which is indexed by a page's hash. The bit of every page with a record is
  // set; bits of pages whose records were taken may still be set, too. So for keys without news, a lookup
  // reads only `marks_`, whose 32 KiB stay in the cache of a CPU core.
  static constexpr size_t kMarks = size_t{1} << 18;

  mutable std::mutex mutex_;  // guards the members below; size_ may be read without the lock
  std::vector<Record> records_;
  size_t first_ = 0;  // all records before this index were taken or replaced
  // Index of the page's pending record, which has been neither taken nor replaced.
  std::unordered_map<PageName, size_t, NameHash> at_;
  std::array<uint64_t, kMarks / 64> marks_{};
  std::atomic<size_t> size_{0};
};

}  // namespace flexkv
