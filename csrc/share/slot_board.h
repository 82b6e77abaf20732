// One tier's slots, as a unit shows them to other units: a row per slot says which page the slot holds, and a
// ring names the rows that changed. One process writes it, others only read (docs/one-cache.md).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "index/block_key.h"
#include "index/slot_listener.h"
#include "share/shared_file.h"

namespace flexkv {

// A slot's row; one cache line. The version is even while the slot holds the page that the row names, and odd
// while it holds none or may be written. So if a reader finds one even version before and after its copy, it
// has copied that page.
struct alignas(64) BoardRow {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> low;  // the key
  std::atomic<uint64_t> high;
  std::atomic<uint64_t> about;  // group << 32 | valid tokens
  // What a page on disk must match; 0 in host memory.
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> expiry;
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> spare;
};
static_assert(sizeof(BoardRow) == 64 && std::atomic<uint64_t>::is_always_lock_free,
              "shared between processes");

struct BoardHeader {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> slots;
  std::atomic<uint64_t> ring;     // its places, a power of two
  std::atomic<uint64_t> head;     // changes so far; change n is at place n % ring
  std::atomic<uint64_t> retired;  // 1: the weights are no longer those that the unit's card names
};

// The content of a row at one time.
struct RowFacts {
  BlockKey key{};
  uint32_t group = 0;
  uint32_t tokens = 0;
  uint64_t generation = 0;
  uint64_t expiry = 0;
  uint64_t epoch = 0;
};

// The parts of a board in memory that `SlotBoard` made.
struct BoardParts {
  BoardHeader* header;
  std::atomic<uint32_t>* ring;
  BoardRow* rows;
};

// Unit: changes. A reader that looks every 20 ms overruns it only if more than 800,000 pages change per
// second.
inline constexpr uint64_t kRingChanges = uint64_t{1} << 14;
// Begins every board.
inline constexpr uint64_t kBoardMagic = 0x3130445242564B46;  // "FKVBRD01", little-endian

int64_t board_bytes(uint64_t slots);
BoardParts board_parts(std::byte* base);

// Reads a row that its owner may be changing. Returns nothing if it names no page or was changed meanwhile;
// sets `version` to that of the row read.
std::optional<RowFacts> read_row(const BoardRow& row, uint64_t& version);

// The writer's side. Not thread-safe.
class SlotBoard : public SlotListener {
 public:
  // Throws CapacityError.
  explicit SlotBoard(uint32_t slots);

  uint32_t slots() const { return slots_; }
  int fd() const { return file_.fd(); }
  int64_t bytes() const { return file_.bytes(); }
  std::byte* base() const { return file_.base(); }

  // The slot may be written from now on. Call before any op that writes it is submitted.
  void begin(uint32_t slot) override;
  // Records what `publish` will say about slots that `begin` has opened. Throws BlockRangeError.
  void note(std::span<const int32_t> slots, std::span<const uint32_t> tokens,
            std::span<const uint64_t> generations, std::span<const uint64_t> expiries, uint64_t epoch);
  // The slot holds this page, and is not written until the next `begin`.
  void publish(uint32_t slot, uint32_t group, const BlockKey& key) override;
  // Withdraws the page. A reader that is copying it finds the version changed.
  void withdraw(uint32_t slot) override;
  // Withdraws all pages.
  void clear() override;
  // Makes every reader leave permanently.
  void retire();

 private:
  void announce(uint32_t slot);

  SharedFile file_;
  BoardParts parts_;
  uint32_t slots_;
  bool retired_ = false;
};

}  // namespace flexkv
