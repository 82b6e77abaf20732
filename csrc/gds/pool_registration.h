// Registers the inference engine's pool with the I/O object, so that contiguous blocks are moved directly
// between disk and pool. Only GPU memory needs to be registered: cuFile directly reaches only memory that it
// has pinned, and copies the bytes of calls on other memory through a buffer.
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
  kAuto,  // register if calls were observed to move bytes directly between a disk and the device
  kOn,    // register also if the route of the calls is not known
};

// A pool's blocks, in one allocation. Each block is contiguous. All sizes are in bytes.
struct PoolRegion {
  uintptr_t base = 0;  // the first block's address
  int64_t blocks = 0;
  int64_t block_stride = 0;
  int64_t block_bytes = 0;  // number of bytes of each block, from its start, that are transferred

  int64_t bytes() const { return blocks < 1 ? 0 : (blocks - 1) * block_stride + block_bytes; }
  bool operator==(const PoolRegion&) const = default;
};

struct MemoryPiece {
  uintptr_t base = 0;
  int64_t bytes = 0;
};

// Unit: bytes. The size of one registration. nvidia-fs runs one call at a time per registration, so with few
// large registrations the disks would wait for each other. nvidia-fs also allocates up to 16 MiB of host
// memory for each registration (nvfs-mmap.h), so many small registrations would need more memory than staging
// does. The size is an estimate; no measurement has confirmed it.
inline constexpr int64_t kPoolPieceBytes = int64_t{512} << 20;

// Cuts a region into pieces of at most `most_bytes`. The cuts are between blocks, where possible at multiples
// of a GPU's 64 KiB pages, because two pieces that share a page would both pin this page. A piece has at
// least one block, even if that block is larger than `most_bytes`.
std::vector<MemoryPiece> pool_pieces(const PoolRegion& region, int64_t most_bytes = kPoolPieceBytes);

struct PoolState {
  int64_t regions = 0;     // number of regions registered now
  int64_t pieces = 0;      // number of pieces registered now
  int64_t bytes = 0;       // total size of the pieces registered now
  int64_t registered = 0;  // number of times that a piece has been registered so far
  int64_t released = 0;    // number of these registrations that have ended so far
  std::string refusal;     // why the blocks of some region pass through staging; empty if no blocks do
};

// The registrations of one pool, which has one region per KV group. Not thread-safe. `io` must outlive this
// object.
class PoolRegistrations {
 public:
  PoolRegistrations(RegisterPool mode, int64_t piece_bytes, std::shared_ptr<TransformDevice> device,
                    FileIo& io)
      : mode_(mode), piece_bytes_(piece_bytes), device_(std::move(device)), io_(io) {}
  ~PoolRegistrations() { release(); }
  PoolRegistrations(const PoolRegistrations&) = delete;
  PoolRegistrations& operator=(const PoolRegistrations&) = delete;

  // Registers a region and remembers it for restore(). If nothing else prevents the registration and no call
  // has been observed to be direct, first calls `look`, which finds out the routes of calls. Does nothing if
  // the I/O object reaches any memory directly.
  void add(const PoolRegion& region, const std::function<void()>& look);
  // Records that a group's blocks cannot be registered at all.
  void refuse(std::string reason);
  // Ends all registrations, so that the pool's memory may be freed. Further calls have no effect.
  void release();
  // Registers the regions again that release() has deregistered.
  void restore();
  // Whether restore() or retry() has to register a region before the next transfer.
  bool waits() const;
  // Registers the regions that add() postponed because no call had been observed to be direct. Does this only
  // if a direct call has been observed since then.
  void retry();
  PoolState state() const;

 private:
  enum class Way { kRegistered, kReleased, kUnseen, kRefused };
  struct Entry {
    PoolRegion region;
    Way way = Way::kRefused;
    std::vector<MemoryPiece> pieces;  // the region's pieces that are registered now
    std::string refusal;
  };
  // Returns why registering the region would fail or would not help. Returns an empty string if it may help.
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
