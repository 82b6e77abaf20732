// Registers an engine's pool with the I/O, so that contiguous blocks move directly between disk and pool.
// Only GPU memory needs this: cuFile directly reaches memory that it has pinned, and bounces the rest.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gds/file_io.h"
#include "gds/transform/device.h"

namespace flexkv {

enum class RegisterPool {
  kOff,
  kAuto,  // if calls were seen to go directly between a disk and the device
  kOn,    // also if nothing shows which way they go
};

// Blocks in one allocation, each of them contiguous. All sizes are in bytes.
struct PoolRegion {
  uintptr_t base = 0;  // the first block's address
  int64_t blocks = 0;
  int64_t block_stride = 0;
  int64_t block_bytes = 0;  // how much of each block moves, from its start

  int64_t bytes() const { return blocks < 1 ? 0 : (blocks - 1) * block_stride + block_bytes; }
  bool operator==(const PoolRegion&) const = default;
};

struct MemoryPiece {
  uintptr_t base = 0;
  int64_t bytes = 0;
};

// Unit: bytes. The size of one registration. nvidia-fs runs one call at a time per registration, so with few
// pieces the disks would wait for each other; and it backs each registration with up to 16 MiB of host memory
// (nvfs-mmap.h), so many small ones would cost more than staging does. Chosen, not measured.
inline constexpr int64_t kPoolPieceBytes = int64_t{512} << 20;

// Cuts a region between blocks, where possible at multiples of a GPU's 64 KiB pages: two pieces that share a
// page would both pin it. A piece has at least one block, even if that is larger than `most_bytes`.
std::vector<MemoryPiece> pool_pieces(const PoolRegion& region, int64_t most_bytes = kPoolPieceBytes);

struct PoolState {
  int64_t regions = 0;     // registered now
  int64_t pieces = 0;      // registered now
  int64_t bytes = 0;       // in the pieces registered now
  int64_t registered = 0;  // pieces registered so far
  int64_t released = 0;    // pieces whose registration has ended so far
  std::string refusal;     // why a region's blocks pass through staging; empty if none does
};

// The registrations of one pool, a region per KV group. Not thread-safe. `io` must outlive this.
class PoolRegistrations {
 public:
  PoolRegistrations(RegisterPool mode, int64_t piece_bytes, std::shared_ptr<TransformDevice> device,
                    FileIo& io)
      : mode_(mode), piece_bytes_(piece_bytes), device_(std::move(device)), io_(io) {}
  ~PoolRegistrations() { release(); }
  PoolRegistrations(const PoolRegistrations&) = delete;
  PoolRegistrations& operator=(const PoolRegistrations&) = delete;

  // Registers a region and keeps it for restore(). Calls `look`, which finds out which way the I/O's calls
  // go, only if the decision depends on it. Does nothing for I/O that reaches any memory.
  void add(const PoolRegion& region, const std::function<void()>& look);
  // Records that a group's blocks cannot be registered at all.
  void refuse(std::string reason);
  // Ends all registrations: the pool's memory may go away. Idempotent.
  void release();
  // Makes the registrations again that release() has ended.
  void restore();
  // Whether transfers have to call restore() or retry() first.
  bool waits() const;
  // Registers what add() put off because no call had been seen to go directly, once one has been.
  void retry();
  PoolState state() const;

 private:
  enum class Way { kRegistered, kReleased, kUnseen, kRefused };
  struct Entry {
    PoolRegion region;
    Way way = Way::kRefused;
    std::vector<MemoryPiece> pieces;  // registered now
    std::string refusal;
  };
  // Why registering the region would fail or not help; empty if it may succeed.
  std::string refusal_of(const PoolRegion& region, const Registering& needs) const;
  void try_to_register(Entry& entry);
  std::string register_pieces(Entry& entry);
  void deregister(std::vector<MemoryPiece>& pieces);

  const RegisterPool mode_;
  const int64_t piece_bytes_;
  std::shared_ptr<TransformDevice> device_;
  FileIo& io_;
  std::vector<Entry> entries_;
  int64_t registered_ = 0;
  int64_t released_ = 0;
};

}  // namespace flexkv
