// Records which pages the other units on this machine (peers) have, and in which slots. Each peer publishes a
// board, which lists the page in each slot. One thread reads the changes on these boards. Another thread
// copies pages from the peers' host pools. The manager's thread takes the news: which pages the peers have
// got and lost.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fair_mutex.h"
#include "index/block_key.h"
#include "share/guarded_copy.h"
#include "share/peer_news.h"
#include "share/shared_file.h"
#include "share/slot_board.h"

namespace flexkv {

// Where slots lie in the file of a peer's host pool. Sizes, offsets and strides are in bytes.
struct PeerPool {
  SharedFile file;
  int64_t slots_offset;
  int64_t slot_bytes;
  int64_t slots_per_extent;
  int64_t extent_stride;

  const std::byte* slot(int64_t number) const {
    const int64_t extent = number / slots_per_extent;
    return file.base() + slots_offset + extent * extent_stride +
           (number - extent * slots_per_extent) * slot_bytes;
  }
};

// A contiguous part of a page. It lies at offset `from` in the peer's slot and at offset `to` in this unit's
// slot.
struct PagePiece {
  int64_t from;
  int64_t to;
  int64_t bytes;
};

// One run of a page, at offset `at` in this unit's slot. The run's digest is at offset `digest_from` in the
// peer's slot and at offset `digest_to` in this unit's slot. An offset of -1 means that the slot has no
// digest.
struct PieceRun {
  int64_t at;
  int64_t bytes;
  int64_t digest_from;
  int64_t digest_to;
};

// Describes how pages of one KV group are copied from a peer's slots to this unit's slots. If `pieces` is
// empty, the peer and this unit have different page formats, and the caller must convert the bytes.
struct PeerFormat {
  std::vector<PagePiece> pieces;
  std::vector<PieceRun> runs;  // the runs that have a digest in either slot
};

struct PeerPlace {
  int32_t peer = -1;  // the peer's number; -1 if no peer has the page
  uint32_t slot = 0;
  RowFacts facts{};
};

inline constexpr size_t kPeerEnds = 5;
// Number of copies with each result, indexed by PeerEnd.
using PeerCounts = std::array<uint64_t, kPeerEnds>;

// Unit: pages. If news about nearly this many pages is pending, `follow` reads no rows until the unit has
// taken some of the news.
inline constexpr size_t kMostNews = size_t{1} << 17;
// The maximum number of peers from which `bring` tries to copy one page.
inline constexpr size_t kMostHolders = 8;

class PeerDirectory {
 public:
  // Adds a peer with its board, and with its pool if it has one. Returns the peer's number. `formats` has one
  // entry per KV group of the peer; `follow` ignores the pages of any other group. Throws ClosedError if the
  // board is not finished or has a different format version, or if the pool is too small for the board's
  // slots.
  int32_t add(SharedFile board, std::optional<PeerPool> pool, std::vector<PeerFormat> formats);
  // Removes a peer and its pages. Releases the lock now and then, so that other threads can use the
  // directory. Unmaps the peer's files when no copy uses them any more. If `keep` is set, unmaps only the
  // peer's board; `find` and `bring` then still use the pages that the board showed last.
  void drop(int32_t peer, bool keep = false);

  // Reads the rows that have changed on the boards of all peers. Returns how many rows it read.
  size_t follow();
  // `take` and `take_of` call the functions of the same names in `PendingNews`. They do not wait for threads
  // that are executing `follow` or `drop`.
  size_t take(size_t most, std::vector<PeerNews>& out) { return news_.take(most, out); }
  size_t take_of(std::span<const BlockKey> keys, uint32_t group, std::vector<PeerNews>& out) {
    return news_.take_of(keys, group, out);
  }
  bool has_news() const { return news_.size() > 0; }

  // Copies a page from any peer that has it into `slot`. If the result is kFormat (the page has a different
  // format), `other` says which peer has the page, and in which slot. A page that expires before
  // `asked.expiry` is not copied, because this unit would keep the page after the peer's copy has expired.
  PeerEnd bring(const RowFacts& asked, std::byte* slot, PeerPlace& other);
  // Copies the first `bytes` bytes of the slot at `place` to `to`. The bytes are in the peer's own format.
  PeerEnd read(const PeerPlace& place, std::byte* to, size_t bytes);
  // Returns where the page was when the boards were last read. If several peers have the page, returns its
  // place in the peer that was added first. Ignores the peers in `without`.
  PeerPlace find(const BlockKey& key, uint32_t group, std::span<const int32_t> without = {}) const;
  // Finds the page of each of `keys` as the other overload of `find` does, and writes the results to
  // `places`. Releases the lock from time to time, so that other threads can acquire it.
  void find(std::span<const BlockKey> keys, uint32_t group, std::span<const int32_t> without,
            std::vector<PeerPlace>& places) const;

  // Calls `visit` with the format of every group of every peer.
  template <class Visit>
  void each_format(Visit visit) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, peer] : peers_) {
      for (const PeerFormat& format : peer->formats) visit(format);
    }
  }

  // Whether the peer was dropped, or no longer has the weights that its card (its description of itself)
  // states.
  bool retired(int32_t peer) const;
  PeerCounts counts(int32_t peer) const;
  size_t pages(int32_t peer) const;
  uint64_t overruns() const { return overruns_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    Peer(SharedFile file, std::optional<PeerPool> mapped, std::vector<PeerFormat> how);
    std::optional<SharedFile> board;  // unset after `drop` with `keep`
    std::optional<PeerPool> pool;
    std::vector<PeerFormat> formats;  // one per KV group
    uint32_t slots = 0;
    // Number of changes in the ring that this unit has read or skipped.
    uint64_t seen = 0;
    bool all = true;                             // whether every row has to be read again
    bool leaves = false;                         // whether the peer is being dropped
    uint32_t next = 0;                           // the row to read next while every row has to be read again
    size_t pages = 0;                            // number of elements of `known` that have a page
    std::vector<std::optional<RowFacts>> known;  // the page that each row showed when it was last read
    std::array<std::atomic<uint64_t>, kPeerEnds> counts{};
    BoardParts parts{};
  };
  struct Holder {
    int32_t peer;
    uint32_t slot;
  };

  static std::optional<RowFacts> page_at(const Peer& peer, uint32_t slot);
  size_t follow(int32_t number, Peer& peer);
  void look(int32_t number, Peer& peer, uint32_t slot);
  void enter(int32_t number, Peer& peer, uint32_t slot, const RowFacts& facts);
  void leave(int32_t number, Peer& peer, uint32_t slot);
  PeerPlace place_of(const PageName& page, std::span<const int32_t> without) const;
  PeerEnd copy(const Peer& peer, uint32_t slot, const RowFacts& asked, std::byte* to) const;
  std::shared_ptr<Peer> at(int32_t peer) const;

  mutable FairMutex mutex_;  // guards peers_ and the state of each peer, holders_ and next_
  std::map<int32_t, std::shared_ptr<Peer>> peers_;
  std::unordered_multimap<PageName, Holder, NameHash> holders_;
  int32_t next_ = 0;
  PendingNews news_;  // has a mutex of its own
  std::atomic<uint64_t> overruns_{0};
};

}  // namespace flexkv
