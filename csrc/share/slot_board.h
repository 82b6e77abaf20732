// The board: shared memory in which a unit shows other units what the slots of one of its tiers hold. The
// board has one row per slot, which describes the page in the slot. A ring lists the rows that changed last.
// One process writes a board; other processes only read it (docs/one-cache.md).
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

// A slot's row, which fills one cache line. The version is even while the slot holds the page that the row
// describes, and odd while the slot holds no page or may be written. If a reader finds the same even version
// before and after it copies the slot, it has copied the page that the row describes.
struct alignas(64) BoardRow {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> low;    // the lower half of the page's key
  std::atomic<uint64_t> high;   // the upper half of the page's key
  std::atomic<uint64_t> about;  // group of the page << 32 | its number of valid tokens
  // Identifies the write that stored the page on disk; 0 for a page in host memory.
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> expiry;  // Unix seconds; 0 if the page never expires
  // Identifies the weights with which the page on disk was computed; 0 for a page in host memory.
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> spare;
};
static_assert(sizeof(BoardRow) == 64 && std::atomic<uint64_t>::is_always_lock_free,
              "shared between processes");

struct BoardHeader {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> slots;
  std::atomic<uint64_t> ring;     // number of elements of the ring, a power of two
  std::atomic<uint64_t> head;     // number of changes so far; change n is at index n % `ring`
  std::atomic<uint64_t> retired;  // 1 if the unit no longer has the weights that its card states
};

// A copy of a row's content.
struct RowFacts {
  BlockKey key{};
  uint32_t group = 0;
  uint32_t tokens = 0;
  uint64_t generation = 0;
  uint64_t expiry = 0;
  uint64_t epoch = 0;
};

// Pointers to the parts of a board in shared memory.
struct BoardParts {
  BoardHeader* header;
  std::atomic<uint32_t>* ring;
  BoardRow* rows;
};

// Unit: changes. The number of elements of the ring. A reader that reads the ring every 20 ms misses changes
// only if there are more than 800,000 changes per second.
inline constexpr uint64_t kRingChanges = uint64_t{1} << 14;
// The first 8 bytes of every finished board.
inline constexpr uint64_t kBoardMagic = 0x3130445242564B46;  // "FKVBRD01", little-endian

int64_t board_bytes(uint64_t slots);
BoardParts board_parts(std::byte* base);

// Reads a row that the board's owner may be changing. Returns nothing if the row shows no page or changed
// during the read. Sets `version` to the row's version before the read.
std::optional<RowFacts> read_row(const BoardRow& row, uint64_t& version);

// A board as its owner uses it, with the calls that change it. Not thread-safe.
class SlotBoard : public SlotListener {
 public:
  // Makes a board on which no slot shows a page. Throws CapacityError if its memory cannot be allocated.
  explicit SlotBoard(uint32_t slots);

  uint32_t slots() const { return slots_; }
  int fd() const { return file_.fd(); }
  int64_t bytes() const { return file_.bytes(); }
  std::byte* base() const { return file_.base(); }

  // Withdraws the slot's page, because an op may write the slot after this call. The caller must call `begin`
  // before it submits any op that writes the slot.
  void begin(uint32_t slot) override;
  // Records the tokens, generations, expiries and epoch that the next `publish` of each of these slots will
  // show. Precondition: the slots show no page. Throws BlockRangeError if the board does not have a slot.
  void note(std::span<const int32_t> slots, std::span<const uint32_t> tokens,
            std::span<const uint64_t> generations, std::span<const uint64_t> expiries, uint64_t epoch);
  // Shows on the board that the slot holds this page. Nothing may write to the slot until the next `begin`.
  // Does nothing after `retire`.
  void publish(uint32_t slot, uint32_t group, const BlockKey& key) override;
  // Withdraws the slot's page. A reader that is copying the page finds the version changed.
  void withdraw(uint32_t slot) override;
  // Withdraws all pages.
  void clear() override;
  // Withdraws all pages, publishes none from then on, and sets `retired` in the header, so that readers no
  // longer use the board.
  void retire();

 private:
  void announce(uint32_t slot);

  SharedFile file_;
  BoardParts parts_;
  uint32_t slots_;
  bool retired_ = false;
};

}  // namespace flexkv
