// Owns what one rank needs to transfer pages between files and the engine's pool: the open files, the threads
// that serve their disks, and the staging memory on one GPU or in plain memory.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "gds/pool_registration.h"
#include "gds/raw_files.h"
#include "gds/staged_transfer.h"
#include "io/io_queue.h"

namespace flexkv {

inline constexpr int32_t kDefaultStagingBlocks = 64;
// Unit: bytes. 64 blocks of a 70B model (80 layers, K and V, 128 KiB each) take 1.25 GiB.
inline constexpr int64_t kDefaultStagingBytes = int64_t{2} << 30;
// Unit: threads per disk. Each has one synchronous call under way; four keep an NVMe disk busy at 2 MiB per
// call.
inline constexpr int32_t kDefaultGdsThreads = 4;

struct GdsOptions {
  int64_t round_robin = 1;
  int32_t threads_per_device = kDefaultGdsThreads;
  bool use_staged_transfer = true;  // false: one call per piece of a page, directly to or from the pool
  int32_t max_staging_blocks = kDefaultStagingBlocks;
  int64_t max_staging_bytes = kDefaultStagingBytes;
  int64_t most_transfer_bytes = INT64_MAX;  // per transfer; more staging than this would never be used
  double deadline_s = 600;                  // per transfer
  double stuck_s = 60;
  RegisterPool register_pool = RegisterPool::kAuto;
  int64_t pool_piece_bytes = kPoolPieceBytes;
  IoBackend io = IoBackend::kAuto;  // for plain memory, if the manager makes its own I/O
};

struct GdsTotals {
  int64_t transfers = 0;
  int64_t pages = 0;
  int64_t straight_pages = 0;  // whose bytes passed through no slot, though their digests may have
  int64_t failed_pages = 0;
  int64_t io_calls = 0;
  int64_t bounced_calls = 0;
  int64_t unknown_calls = 0;
  int64_t io_bytes = 0;
  int64_t launches = 0;
};

class FLEXKV_EXPORT GDSManager {
 public:
  // `device` holds the pool and the staging; `choose_io` makes the I/O for it and `options.io`. Throws
  // ConfigError for files that cannot be opened and options that are not allowed.
  GDSManager(const FilePaths& paths, const GdsOptions& options, std::shared_ptr<TransformDevice> device);
  // Uses the caller's own I/O over `files`, such as a decorator. Also throws ConfigError if `options.io` is
  // not kAuto.
  GDSManager(std::shared_ptr<const RawFiles> files, const GdsOptions& options,
             std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io);
  ~GDSManager();
  GDSManager(const GDSManager&) = delete;
  GDSManager& operator=(const GDSManager&) = delete;

  // Moves pages, and returns when none of their bytes can move any more. Transfers that use the manager's own
  // staging run one at a time. `staging` (null: the manager's own) has room for at least one block;
  // `force_direct` makes one call per piece, whatever the options say. Throws ClosedError, CapacityError, and
  // BlockRangeError for a file that does not exist, a block read into twice, or a place written twice.
  TransferReport transfer(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                          std::shared_ptr<StagingBuffer> staging = nullptr, bool force_direct = false,
                          const TransferHooks& hooks = {});
  // Registers `region` with the I/O if `options.register_pool` says so, so that its blocks move directly
  // between disk and pool; pool() tells whether that worked. Call it before reserve_staging(). Throws
  // ClosedError, and GeometryError for a region that has no blocks, whose blocks overlap, or that exceeds the
  // address space.
  void register_pool(const PoolRegion& region);
  // Records why blocks of a group cannot be registered. Throws ClosedError.
  void refuse_pool(std::string reason);
  // Ends the pool's registrations, before its memory goes away. The next transfer or restore_pool() makes
  // them again. Throws ContractError if a transfer is under way. Idempotent.
  void release_pool();
  void restore_pool();
  PoolState pool() const;
  // Allocates the staging that transfers of such pages will use, so that a shortage shows before the first
  // transfer. Does not move `samples`, which only decide, as a transfer's pages would, whether pages pass
  // through slots at all. The I/O may read from files to learn their routes; if a disk does not answer for
  // `stuck_s` (at most ten seconds), the manager goes out of service. Throws CapacityError, which says which
  // setting to change, ClosedError, and DiskError if the manager is out of service.
  void reserve_staging(const PageMap& map, std::span<const StagedPage> samples, bool force_direct = false);
  // Ends the transfers under way early: their pages that were not issued yet end as cancelled.
  void cancel();
  // Cancels, waits for the I/O in flight, closes the files and joins the threads. Idempotent. I/O that never
  // ends keeps its files open.
  void close();

  // The files' paths, by device; still known after close().
  const FilePaths& paths() const { return paths_; }
  int32_t devices() const { return static_cast<int32_t>(paths_.size()); }
  bool has_file(int32_t device, int64_t file) const;
  const GdsOptions& options() const { return options_; }
  const TransformDevice& device() const { return *parts_.device; }
  const std::shared_ptr<TransformDevice>& device_ptr() const { return parts_.device; }
  GdsTotals totals() const;
  // Names the I/O and how it reaches the device, for a log line.
  std::string describe() const;
  // Why no file reaches the device's memory directly; empty if one does, or if the route of one is not known
  // yet.
  std::string direct_refusal() const;
  // Why this manager is out of service; empty while it is not.
  std::string down_reason() const;
  int64_t staging_bytes() const;
  // How the last reservation or transfer divided the manager's own staging into slots; {0, 0} while there is
  // none.
  struct StagingSlots {
    int64_t slots = 0;
    int64_t slot_bytes = 0;
  };
  StagingSlots staging_slots() const;
  int32_t threads() const;

 private:
  class Running;
  // How the pages of a map move: through slots, directly except for their trailers, or entirely directly.
  enum class Way { kStaged, kBeside, kStraight };
  Way way_of(const PageMap& map, std::span<const StagedPage> pages, bool force_direct) const;
  int64_t slots_for(int64_t slot_bytes) const;
  // Null if the manager is out of service. Precondition: staging_mutex_ is held, and mutex_ is not.
  std::shared_ptr<StagingBuffer> own_staging(const PageMap& map, const TransferControl& control);
  std::shared_ptr<StagingBuffer> make_staging(int64_t slots, int64_t slot_bytes) const;
  // Finds out the routes of calls, using temporary memory.
  void look_first(const TransferControl& control);
  // Makes the pool registrations that were put off until the next transfer.
  void prepare_pool();
  // Makes the reads that the I/O asks for in looks(). Returns an empty string, or which read did not end in
  // time; that read then keeps the buffer alive.
  std::string look_around(const std::shared_ptr<StagingBuffer>& buffer, const TransferControl& control) const;
  void take_down(std::string reason);
  void check_pages(std::span<const StagedPage> pages, bool is_read) const;
  TransferReport dispatch(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                          std::shared_ptr<StagingBuffer> staging, bool force_direct,
                          const TransferControl& control, const TransferHooks& hooks);
  TransferReport dispatch_staged(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                                 std::shared_ptr<StagingBuffer> staging, const TransferControl& control,
                                 const TransferHooks& hooks);

  const GdsOptions options_;
  const FilePaths paths_;
  TransferParts parts_;
  mutable std::mutex pool_mutex_;            // held while the pool is registered; taken before mutex_
  std::unique_ptr<PoolRegistrations> pool_;  // null once closed
  std::mutex staging_mutex_;                 // one transfer at a time uses the manager's own staging
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  // Both are set together, so that `slots` never describes a buffer that is gone.
  struct OwnStaging {
    std::shared_ptr<StagingBuffer> buffer;
    StagingSlots slots;
  };
  OwnStaging staging_;
  std::set<TransferControl*> running_;
  GdsTotals totals_;
  std::string down_reason_;
  bool closed_ = false;
};

}  // namespace flexkv
