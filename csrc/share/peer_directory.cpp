#include "share/peer_directory.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/digest.h"
#include "base/error.h"

namespace flexkv {
namespace {

// Unit: rows (in a search: keys). The maximum number of rows that a thread processes before it releases the
// lock. Processing this many rows takes about 100 us.
constexpr size_t kRowsAtOnce = 1024;

// Whether the pool's file is large enough for all slots. The numbers come from the peer's card (its
// description of itself). Whatever they are, the products in this function cannot overflow, because none is
// greater than the file's size or the stride.
bool has_room(const PeerPool& pool, int64_t slots) {
  const int64_t last = slots - 1;
  const int64_t in_extent = (last % pool.slots_per_extent + 1) * pool.slot_bytes;
  const int64_t left = pool.file.bytes() - pool.slots_offset - in_extent;
  return left >= 0 && last / pool.slots_per_extent <= left / pool.extent_stride;
}

uint64_t digest_at(const std::byte* from) {
  uint64_t digest = 0;
  copy_words(reinterpret_cast<std::byte*>(&digest), from, sizeof digest);
  return digest;
}

bool same_page(const RowFacts& a, const RowFacts& b) {
  return a.key == b.key && a.group == b.group && a.tokens == b.tokens && a.generation == b.generation &&
         a.expiry == b.expiry && a.epoch == b.epoch;
}

}  // namespace

PeerDirectory::Peer::Peer(SharedFile file, std::optional<PeerPool> mapped, std::vector<PeerFormat> how)
    : board(std::move(file)),
      pool(std::move(mapped)),
      formats(std::move(how)),
      parts(board_parts(board->base())) {
  const BoardHeader& header = *parts.header;
  const uint64_t rows = header.slots.load(std::memory_order_relaxed);
  if (header.magic.load(std::memory_order_acquire) != kBoardMagic ||
      header.ring.load(std::memory_order_relaxed) != kRingChanges || rows == 0 || rows > UINT32_MAX ||
      board_bytes(rows) != board->bytes()) {
    throw ClosedError("a peer's board is of another version, or was not finished");
  }
  slots = static_cast<uint32_t>(rows);
  if (pool && !has_room(*pool, slots)) {
    throw ClosedError("a peer's pool has no room for the slots of its board");
  }
  known.resize(slots);
}

int32_t PeerDirectory::add(SharedFile board, std::optional<PeerPool> pool, std::vector<PeerFormat> formats) {
  auto peer = std::make_shared<Peer>(std::move(board), std::move(pool), std::move(formats));
  const std::lock_guard lock(mutex_);
  peers_.emplace(next_, std::move(peer));
  return next_++;
}

void PeerDirectory::drop(int32_t number, bool keep) {
  std::shared_ptr<Peer> gone;  // destroyed after the lock is released, so that its files are unmapped then
  for (uint32_t next = 0; !gone;) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(number);
    if (found == peers_.end()) return;
    Peer& peer = *found->second;
    if (keep) {
      peer.board.reset();
      return;
    }
    peer.leaves = true;
    const auto end = static_cast<uint32_t>(std::min<size_t>(next + kRowsAtOnce, peer.slots));
    for (; next < end; ++next) leave(number, peer, next);
    if (next < peer.slots) continue;
    gone = std::move(found->second);
    peers_.erase(found);
  }
}

size_t PeerDirectory::follow() {
  std::vector<int32_t> numbers;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, peer] : peers_) {
      if (peer->board && !peer->leaves) numbers.push_back(number);
    }
  }
  size_t looked = 0;
  for (const int32_t number : numbers) {
    // If a peer's rows change faster than this thread reads them, the thread must still get to the other
    // peers.
    const size_t most = looked + kRingChanges + kRowsAtOnce;
    for (size_t rows = kRowsAtOnce; rows == kRowsAtOnce && looked < most;) {
      const std::lock_guard lock(mutex_);
      const auto found = peers_.find(number);
      if (found == peers_.end() || !found->second->board || found->second->leaves) break;
      rows = follow(number, *found->second);
      looked += rows;
    }
  }
  return looked;
}

size_t PeerDirectory::follow(int32_t number, Peer& peer) {
  if (news_.size() + 2 * kRowsAtOnce > kMostNews) return 0;
  const BoardHeader& header = *peer.parts.header;
  const uint64_t head = header.head.load(std::memory_order_acquire);
  if (!peer.all && head - peer.seen > kRingChanges) {
    peer.all = true;
    overruns_.fetch_add(1, std::memory_order_relaxed);
  }
  if (peer.all) {
    // Reads all rows once. The rows that change in the meantime are listed in the ring, beginning with change
    // number `seen`.
    if (peer.next == 0) peer.seen = head;
    size_t rows = 0;
    for (; rows < kRowsAtOnce && peer.next < peer.slots; ++rows) look(number, peer, peer.next++);
    if (peer.next == peer.slots) {
      peer.all = false;
      peer.next = 0;
    }
    return std::max<size_t>(rows, 1);
  }
  size_t rows = 0;
  while (rows < kRowsAtOnce && peer.seen != head) {
    const uint32_t slot = peer.parts.ring[peer.seen % kRingChanges].load(std::memory_order_acquire);
    // The peer may have overwritten this element of the ring before this thread read it. In that case, the
    // next call reads all rows.
    if (header.head.load(std::memory_order_acquire) - peer.seen > kRingChanges) break;
    if (slot < peer.slots) look(number, peer, slot);
    ++peer.seen;
    ++rows;
  }
  return rows;
}

// Returns the page that a slot's row shows. Returns nothing if the row shows no page, or if the peer does not
// have the page's KV group.
std::optional<RowFacts> PeerDirectory::page_at(const Peer& peer, uint32_t slot) {
  uint64_t version = 0;
  const auto facts = read_row(peer.parts.rows[slot], version);
  return facts && facts->group < peer.formats.size() ? facts : std::nullopt;
}

void PeerDirectory::look(int32_t number, Peer& peer, uint32_t slot) {
  const auto facts = page_at(peer, slot);
  const auto& known = peer.known[slot];
  if (facts && known && same_page(*facts, *known)) return;
  leave(number, peer, slot);
  if (facts) enter(number, peer, slot, *facts);
}

void PeerDirectory::enter(int32_t number, Peer& peer, uint32_t slot, const RowFacts& facts) {
  const PageName name{facts.key, facts.group};
  if (!holders_.contains(name)) news_.tell(facts, true);
  holders_.emplace(name, Holder{number, slot});
  peer.known[slot] = facts;
  ++peer.pages;
}

void PeerDirectory::leave(int32_t number, Peer& peer, uint32_t slot) {
  if (!peer.known[slot]) return;
  const RowFacts facts = *peer.known[slot];
  const PageName name{facts.key, facts.group};
  const auto [first, last] = holders_.equal_range(name);
  for (auto at = first; at != last; ++at) {
    if (at->second.peer != number || at->second.slot != slot) continue;
    holders_.erase(at);
    break;
  }
  peer.known[slot].reset();
  --peer.pages;
  if (!holders_.contains(name)) news_.tell(facts, false);
}

std::shared_ptr<PeerDirectory::Peer> PeerDirectory::at(int32_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(number);
  return found == peers_.end() ? nullptr : found->second;
}

PeerPlace PeerDirectory::find(const BlockKey& key, uint32_t group, std::span<const int32_t> without) const {
  const std::lock_guard lock(mutex_);
  return place_of({key, group}, without);
}

void PeerDirectory::find(std::span<const BlockKey> keys, uint32_t group, std::span<const int32_t> without,
                         std::vector<PeerPlace>& places) const {
  places.clear();
  places.reserve(keys.size());
  while (places.size() < keys.size()) {
    const std::lock_guard lock(mutex_);
    const size_t end = std::min(keys.size(), places.size() + kRowsAtOnce);
    while (places.size() < end) places.push_back(place_of({keys[places.size()], group}, without));
  }
}

PeerPlace PeerDirectory::place_of(const PageName& page, std::span<const int32_t> without) const {
  PeerPlace place;
  const auto [first, last] = holders_.equal_range(page);
  for (auto at = first; at != last; ++at) {
    const Holder& holder = at->second;
    if (place.peer >= 0 && holder.peer >= place.peer) continue;
    if (std::ranges::find(without, holder.peer) != without.end()) continue;
    place = {holder.peer, holder.slot, *peers_.at(holder.peer)->known[holder.slot]};
  }
  return place;
}

PeerEnd PeerDirectory::bring(const RowFacts& asked, std::byte* slot, PeerPlace& other) {
  std::array<int32_t, kMostHolders> tried{};
  PeerEnd end = PeerEnd::kAbsent;
  for (size_t tries = 0; tries < kMostHolders; ++tries) {
    const PeerPlace place = find(asked.key, asked.group, {tried.data(), tries});
    const auto peer = place.peer < 0 ? nullptr : at(place.peer);
    if (!peer) return end;
    tried[tries] = place.peer;
    // The peer has the group `asked.group`, because `find` returns a peer only for pages of groups that the
    // peer has.
    if (peer->pool && peer->formats[asked.group].pieces.empty()) {
      other = place;
      end = PeerEnd::kFormat;
      continue;
    }
    const PeerEnd tried_end = copy(*peer, place.slot, asked, slot);
    peer->counts[static_cast<size_t>(tried_end)].fetch_add(1, std::memory_order_relaxed);
    if (tried_end == PeerEnd::kOk) return tried_end;
    if (end != PeerEnd::kFormat) end = tried_end;
  }
  return end;
}

PeerEnd PeerDirectory::copy(const Peer& peer, uint32_t slot, const RowFacts& asked, std::byte* to) const {
  if (!peer.pool) return PeerEnd::kAbsent;
  const BoardRow& row = peer.parts.rows[slot];
  uint64_t version = 0;
  if (!row_holds(row, asked, version)) return PeerEnd::kAbsent;
  const PeerFormat& format = peer.formats[asked.group];
  const std::byte* from = peer.pool->slot(slot);
  for (const PagePiece& piece : format.pieces) {
    copy_words(to + piece.to, from + piece.from, static_cast<size_t>(piece.bytes));
  }
  std::vector<uint64_t> digests;
  for (const PieceRun& run : format.runs) {
    if (run.digest_from >= 0) digests.push_back(digest_at(from + run.digest_from));
  }
  if (!row_is_at(row, version)) return PeerEnd::kChanged;
  size_t next = 0;
  for (const PieceRun& run : format.runs) {
    const uint64_t digest = run_digest(to + run.at, static_cast<size_t>(run.bytes));
    if (run.digest_from >= 0 && digests[next++] != digest) return PeerEnd::kDigest;
    if (run.digest_to >= 0) std::memcpy(to + run.digest_to, &digest, sizeof digest);
  }
  return PeerEnd::kOk;
}

PeerEnd PeerDirectory::read(const PeerPlace& place, std::byte* to, size_t bytes) {
  const auto peer = at(place.peer);
  if (!peer || !peer->pool || static_cast<int64_t>(bytes) > peer->pool->slot_bytes ||
      place.slot >= peer->slots) {
    return PeerEnd::kAbsent;
  }
  const RowFacts& asked = place.facts;
  const BoardRow& row = peer->parts.rows[place.slot];
  uint64_t version = 0;
  PeerEnd end = PeerEnd::kAbsent;
  if (row_holds(row, asked, version)) {
    copy_words(to, peer->pool->slot(place.slot), bytes);
    end = row_is_at(row, version) ? PeerEnd::kOk : PeerEnd::kChanged;
  }
  peer->counts[static_cast<size_t>(end)].fetch_add(1, std::memory_order_relaxed);
  return end;
}

bool PeerDirectory::retired(int32_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(number);
  if (found == peers_.end()) return true;
  const Peer& peer = *found->second;
  return peer.board && peer.parts.header->retired.load(std::memory_order_acquire) != 0;
}

PeerCounts PeerDirectory::counts(int32_t number) const {
  PeerCounts copied{};
  const auto peer = at(number);
  for (size_t end = 0; peer && end < kPeerEnds; ++end) {
    copied[end] = peer->counts[end].load(std::memory_order_relaxed);
  }
  return copied;
}

size_t PeerDirectory::pages(int32_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(number);
  return found == peers_.end() ? 0 : found->second->pages;
}

}  // namespace flexkv
