#include "share/slot_board.h"

#include <string>

#include "base/align.h"
#include "base/error.h"

namespace flexkv {
namespace {

constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kRingBytes = static_cast<int64_t>(kRingChanges * sizeof(std::atomic<uint32_t>));
static_assert(sizeof(BoardHeader) <= kHeaderBytes && kRingBytes % 64 == 0);

}  // namespace

int64_t board_bytes(uint64_t slots) {
  return kHeaderBytes + kRingBytes + static_cast<int64_t>(slots * sizeof(BoardRow));
}

BoardParts board_parts(std::byte* base) {
  return {reinterpret_cast<BoardHeader*>(base), reinterpret_cast<std::atomic<uint32_t>*>(base + kHeaderBytes),
          reinterpret_cast<BoardRow*>(base + kHeaderBytes + kRingBytes)};
}

std::optional<RowFacts> read_row(const BoardRow& row, uint64_t& version) {
  version = row.version.load(std::memory_order_acquire);
  if (version % 2 != 0) return std::nullopt;
  // These loads have acquire order, so that the second load of the row's version cannot be reordered before
  // them.
  const uint64_t about = row.about.load(std::memory_order_acquire);
  const RowFacts facts{
      .key = {row.low.load(std::memory_order_acquire), row.high.load(std::memory_order_acquire)},
      .group = static_cast<uint32_t>(about >> 32),
      .tokens = static_cast<uint32_t>(about),
      .generation = row.generation.load(std::memory_order_acquire),
      .expiry = row.expiry.load(std::memory_order_acquire),
      .epoch = row.epoch.load(std::memory_order_acquire)};
  if (row.version.load(std::memory_order_relaxed) != version) return std::nullopt;
  return facts;
}

SlotBoard::SlotBoard(uint32_t slots)
    : file_(SharedFile::make("flexkv-board", board_bytes(slots))),
      parts_(board_parts(file_.base())),
      slots_(slots) {
  for (uint32_t slot = 0; slot < slots; ++slot) {
    parts_.rows[slot].version.store(1, std::memory_order_relaxed);
  }
  parts_.header->slots.store(slots, std::memory_order_relaxed);
  parts_.header->ring.store(kRingChanges, std::memory_order_relaxed);
  parts_.header->magic.store(kBoardMagic, std::memory_order_release);
}

void SlotBoard::announce(uint32_t slot) {
  const uint64_t head = parts_.header->head.load(std::memory_order_relaxed);
  parts_.ring[head % kRingChanges].store(slot, std::memory_order_release);
  parts_.header->head.store(head + 1, std::memory_order_release);
}

void SlotBoard::begin(uint32_t slot) { withdraw(slot); }

void SlotBoard::note(std::span<const int32_t> slots, std::span<const uint32_t> tokens,
                     std::span<const uint64_t> generations, std::span<const uint64_t> expiries,
                     uint64_t epoch) {
  for (const int32_t slot : slots) {
    if (slot >= 0 && static_cast<uint32_t>(slot) < slots_) continue;
    throw BlockRangeError("board: slot " + std::to_string(slot) + "; allowed are 0 to " +
                          std::to_string(slots_ - 1));
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    BoardRow& row = parts_.rows[slots[i]];
    row.about.store(tokens[i], std::memory_order_release);
    row.generation.store(generations.empty() ? 0 : generations[i], std::memory_order_release);
    row.expiry.store(expiries.empty() ? 0 : expiries[i], std::memory_order_release);
    row.epoch.store(epoch, std::memory_order_release);
  }
}

void SlotBoard::publish(uint32_t slot, uint32_t group, const BlockKey& key) {
  if (retired_) return;
  BoardRow& row = parts_.rows[slot];
  const uint64_t version = row.version.load(std::memory_order_relaxed);
  if (version % 2 == 0) return;
  const uint64_t tokens = row.about.load(std::memory_order_relaxed) & 0xFFFFFFFFu;
  row.about.store(uint64_t{group} << 32 | tokens, std::memory_order_release);
  row.low.store(key.low, std::memory_order_release);
  row.high.store(key.high, std::memory_order_release);
  row.version.store(version + 1, std::memory_order_release);
  announce(slot);
}

void SlotBoard::withdraw(uint32_t slot) {
  BoardRow& row = parts_.rows[slot];
  const uint64_t version = row.version.load(std::memory_order_relaxed);
  if (version % 2 != 0) return;
  // Every write to the slot comes after this store of the version: the calling thread submits the op that
  // writes the slot only after begin() has returned.
  row.version.store(version + 1, std::memory_order_seq_cst);
  announce(slot);
}

void SlotBoard::clear() {
  for (uint32_t slot = 0; slot < slots_; ++slot) withdraw(slot);
}

void SlotBoard::retire() {
  retired_ = true;
  parts_.header->retired.store(1, std::memory_order_seq_cst);
  clear();
}

}  // namespace flexkv
