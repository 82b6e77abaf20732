// Registers an engine's pool with the I/O, so that blocks which lie in one piece move straight between disk
// and pool. Only memory of a GPU needs this: cuFile reaches what it has pinned, and bounces everything else.
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
  kAuto,  // where calls are seen to go straight between a disk and the device
  kOn,    // also where nothing shows which way they go
};

// Blocks that lie in one piece each, in one allocation. All sizes are in bytes.
struct PoolRegion {
  uintptr_t base = 0;  // of the first block
  int64_t blocks = 0;
  int64_t block_stride = 0;
  int64_t block_bytes = 0;  // that move, from each block's start

  int64_t bytes() const { return blocks < 1 ? 0 : (blocks - 1) * block_stride + block_bytes; }
  bool operator==(const PoolRegion&) const = default;
};

struct MemoryPiece {
  uintptr_t base = 0;
  int64_t bytes = 0;
};

// Unit: bytes, of one registration. nvidia-fs keeps one call under way per registration, so that a pool in
// few pieces would have its disks wait for each other, and backs each with up to 16 MiB of host memory
// (nvfs-mmap.h), so that many small ones would cost more than staging does. Chosen, not measured.
inline constexpr int64_t kPoolPieceBytes = int64_t{512} << 20;

// Cuts a region between blocks, where possible at multiples of a GPU's pages of 64 KiB, which two pieces
// would otherwise both pin. A piece has at least one block, and then may be larger than `most_bytes`.
std::vector<MemoryPiece> pool_pieces(const PoolRegion& region, int64_t most_bytes = kPoolPieceBytes);

struct PoolState {
  int64_t regions = 0;     // that are registered now
  int64_t pieces = 0;      // that are registered now
  int64_t bytes = 0;       // of these pieces
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

  // Registers a region and keeps it for restore(). `look` has the I/O find out which way calls go; it is
  // called only if that decides something. I/O that reaches any memory gets no registration.
  void add(const PoolRegion& region, const std::function<void()>& look);
  // Notes that a group's blocks cannot be registered at all.
  void refuse(std::string reason);
  // Ends all registrations: the pool's memory may go away. Idempotent.
  void release();
  // Registers again what release() has ended.
  void restore();
  // Whether transfers have to call restore() or retry() first.
  bool waits() const;
  // Registers what add() refused because no call had been seen to go straight, once one has.
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
  // Why registering the region must fail or gains nothing; empty if it may succeed.
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
