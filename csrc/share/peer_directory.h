// Which pages the other units of this machine have, and where: follows their boards, and copies pages from
// their host pools. One thread follows the boards, another copies pages, and the manager's thread takes the
// news.
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

// Where slots lie in the file of a peer's host pool.
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

// Bytes of a page that lie at `from` in the peer's slot and at `to` in ours.
struct PagePiece {
  int64_t from;
  int64_t to;
  int64_t bytes;
};

// One run of a page in our slot, and where its digest lies in the peer's slot and in ours; -1 for none.
struct PieceRun {
  int64_t at;
  int64_t bytes;
  int64_t digest_from;
  int64_t digest_to;
};

// How pages of one KV group are copied from the peer's slots to ours; without pieces, the caller must convert
// the bytes.
struct PeerFormat {
  std::vector<PagePiece> pieces;
  std::vector<PieceRun> runs;  // those with a digest on either side
};

struct PeerPlace {
  int32_t peer = -1;  // -1: no peer has the page
  uint32_t slot = 0;
  RowFacts facts{};
};

inline constexpr size_t kPeerEnds = 5;
using PeerCounts = std::array<uint64_t, kPeerEnds>;  // pages by PeerEnd

// Unit: pages. Beyond it `follow` waits until the unit has taken news.
inline constexpr size_t kMostNews = size_t{1} << 17;
// How many holders of one page are recorded and tried; further ones would be of no use.
inline constexpr size_t kMostHolders = 8;

class PeerDirectory {
 public:
  // Maps a peer's board, and its pool if it has one, and returns the peer's number. `formats`: one for each
  // of the peer's KV groups; rows of any other group count as rows without a page. Throws ClosedError if the
  // files are not what was announced.
  int32_t add(SharedFile board, std::optional<PeerPool> pool, std::vector<PeerFormat> formats);
  // Forgets a peer, piece by piece, and its mappings once no copy uses them. `keep`: its pages stay known, as
  // last seen.
  void drop(int32_t peer, bool keep = false);

  // Reads what has changed. Returns how many rows it looked at.
  size_t follow();
  // See `PendingNews`. Neither waits for a thread that follows or forgets a peer.
  size_t take(size_t most, std::vector<PeerNews>& out) { return news_.take(most, out); }
  size_t take_of(std::span<const BlockKey> keys, uint32_t group, std::vector<PeerNews>& out) {
    return news_.take_of(keys, group, out);
  }
  bool has_news() const { return news_.size() > 0; }

  // Copies a page into `slot`. On kFormat, `other` says which peer has it. A page that expires before
  // `asked.expiry` is not taken, because it would be kept longer than its holder may keep it.
  PeerEnd bring(const RowFacts& asked, std::byte* slot, PeerPlace& other);
  // Copies the leading `bytes` of a page's slot in the peer's own format.
  PeerEnd read(const PeerPlace& place, std::byte* to, size_t bytes);
  // Where the page lies now, or was last seen; the peers that joined first come first, without those in
  // `without`.
  PeerPlace find(const BlockKey& key, uint32_t group, std::span<const int32_t> without = {}) const;
  // Finds several keys, and releases the lock now and then between them so that other threads get it.
  void find(std::span<const BlockKey> keys, uint32_t group, std::span<const int32_t> without,
            std::vector<PeerPlace>& places) const;

  // Calls `visit` with every peer's format of every group.
  template <class Visit>
  void each_format(Visit visit) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, peer] : peers_) {
      for (const PeerFormat& format : peer->formats) visit(format);
    }
  }

  // Whether the peer's weights are no longer those that its card names, or the peer was dropped.
  bool retired(int32_t peer) const;
  PeerCounts counts(int32_t peer) const;
  size_t pages(int32_t peer) const;
  uint64_t overruns() const { return overruns_.load(std::memory_order_relaxed); }

 private:
  struct Peer {
    Peer(SharedFile file, std::optional<PeerPool> mapped, std::vector<PeerFormat> how);
    std::optional<SharedFile> board;  // unset for a peer whose pages are only remembered
    std::optional<PeerPool> pool;
    std::vector<PeerFormat> formats;  // by group
    uint32_t slots = 0;
    uint64_t seen = 0;
    bool all = true;      // every row has to be read again
    bool leaves = false;  // is being dropped
    uint32_t next = 0;
    size_t pages = 0;
    std::vector<std::optional<RowFacts>> known;  // by slot
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

  mutable FairMutex mutex_;  // guards the members below
  std::map<int32_t, std::shared_ptr<Peer>> peers_;
  std::unordered_multimap<PageName, Holder, NameHash> holders_;
  int32_t next_ = 0;
  PendingNews news_;  // guards itself
  std::atomic<uint64_t> overruns_{0};
};

}  // namespace flexkv
