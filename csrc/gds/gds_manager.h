// Owns everything that one rank needs to transfer pages between files and the engine's pool: the open files,
// the threads that serve the files' disks, and the staging memory on one GPU or in plain memory.
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
// Unit: bytes. The default limit on staging memory. For example, 64 blocks of a 70B model (80 layers with 128
// KiB of K and 128 KiB of V per block) take 1.25 GiB.
inline constexpr int64_t kDefaultStagingBytes = int64_t{2} << 30;
// Unit: threads per disk. Each thread has one synchronous call in flight. Four threads keep an NVMe disk busy
// at 2 MiB per call.
inline constexpr int32_t kDefaultGdsThreads = 4;

struct GdsOptions {
  int64_t round_robin = 1;  // consecutive blocks per device; see RawFileRule
  int32_t threads_per_device = kDefaultGdsThreads;
  bool use_staged_transfer = true;  // if false, each piece of a page moves directly, in one call
  int32_t max_staging_blocks = kDefaultStagingBlocks;
  int64_t max_staging_bytes = kDefaultStagingBytes;
  int64_t most_transfer_bytes = INT64_MAX;  // how much one transfer moves at most; limits the staging
  double deadline_s = 600;                  // how long one transfer may take
  double stuck_s = 60;                      // see TransferControl::stuck_s()
  RegisterPool register_pool = RegisterPool::kAuto;
  int64_t pool_piece_bytes = kPoolPieceBytes;
  IoBackend io = IoBackend::kAuto;  // for plain memory; only used if the manager makes its own I/O
};

struct GdsTotals {
  int64_t transfers = 0;
  int64_t pages = 0;
  int64_t straight_pages = 0;  // pages whose bytes passed through no slot, even if their digests did
  int64_t failed_pages = 0;
  int64_t io_calls = 0;
  int64_t bounced_calls = 0;
  int64_t unknown_calls = 0;
  int64_t io_bytes = 0;
  int64_t launches = 0;
};

class FLEXKV_EXPORT GDSManager {
 public:
  // The pool and the staging are in memory of `device`. `choose_io` makes the I/O, as `device` and
  // `options.io` require. Throws ConfigError if a file cannot be opened or an option has a value that is not
  // allowed.
  GDSManager(const FilePaths& paths, const GdsOptions& options, std::shared_ptr<TransformDevice> device);
  // Uses I/O over `files` that the caller has made, such as a decorator. Throws ConfigError if an option has
  // a value that is not allowed, or if `options.io` is not kAuto.
  GDSManager(std::shared_ptr<const RawFiles> files, const GdsOptions& options,
             std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io);
  ~GDSManager();
  GDSManager(const GDSManager&) = delete;
  GDSManager& operator=(const GDSManager&) = delete;

  // Moves pages, and returns when none of their bytes can move any more. Transfers that use the manager's own
  // staging run one at a time. `staging`, if not null, is used instead of the manager's own staging, and must
  // be large enough for one block. With `force_direct`, each piece moves directly in one call, even if the
  // options say otherwise. Throws ClosedError if the manager is closed, CapacityError if staging is too small
  // or cannot be allocated, and BlockRangeError if a file does not exist, two pages are read into one block,
  // or two pages are written to one place.
  TransferReport transfer(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                          std::shared_ptr<StagingBuffer> staging = nullptr, bool force_direct = false,
                          const TransferHooks& hooks = {});
  // Registers `region` with the I/O if `options.register_pool` says so, so that its blocks move directly
  // between disk and pool. pool() says whether it was registered. Must be called before reserve_staging().
  // Throws ClosedError if the manager is closed, and GeometryError if the region has no blocks, its blocks
  // overlap, or it exceeds the address space.
  void register_pool(const PoolRegion& region);
  // Records why blocks of a group cannot be registered. Throws ClosedError if the manager is closed.
  void refuse_pool(std::string reason);
  // Ends the pool's registrations, so that the pool's memory may be freed. The next transfer or
  // restore_pool() registers it again. Throws ContractError if a transfer is running. Idempotent.
  void release_pool();
  // Registers the pool again after release_pool().
  void restore_pool();
  PoolState pool() const;
  // Allocates the staging that transfers with `map` will use, so that a shortage shows before the first
  // transfer. Allocates no staging if pages like `samples` need no slot; `samples` are not moved. The manager
  // may make probing reads from files to learn their routes. If a disk does not answer for `stuck_s` (at most
  // ten seconds), the manager goes out of service. Throws CapacityError, which says which setting to change,
  // ClosedError if the manager is closed, and DiskError if it is out of service.
  void reserve_staging(const PageMap& map, std::span<const StagedPage> samples, bool force_direct = false);
  // Ends the running transfers early: pages whose I/O was not issued yet fail as cancelled.
  void cancel();
  // Cancels the running transfers, waits for the I/O in flight, closes the files and joins the threads. I/O
  // that never finishes keeps its files open. Idempotent.
  void close();

  // The files' paths, by device; available even after close().
  const FilePaths& paths() const { return paths_; }
  int32_t devices() const { return static_cast<int32_t>(paths_.size()); }
  bool has_file(int32_t device, int64_t file) const;
  const GdsOptions& options() const { return options_; }
  const TransformDevice& device() const { return *parts_.device; }
  const std::shared_ptr<TransformDevice>& device_ptr() const { return parts_.device; }
  GdsTotals totals() const;
  // Describes the I/O and how it reaches the device, for a log line.
  std::string describe() const;
  // Why calls on no file move bytes directly to the device's memory; empty if calls on some file do, or if
  // some file's route is not known yet.
  std::string direct_refusal() const;
  // Why this manager is out of service; empty if it is in service.
  std::string down_reason() const;
  int64_t staging_bytes() const;
  // How the last reservation or transfer divided the manager's own staging into slots; {0, 0} if there is no
  // staging.
  struct StagingSlots {
    int64_t slots = 0;
    int64_t slot_bytes = 0;
  };
  StagingSlots staging_slots() const;
  int32_t threads() const;

 private:
  class Running;
  // How pages move: through slots, directly except for their trailers, or completely directly.
  enum class Way { kStaged, kBeside, kStraight };
  Way way_of(const PageMap& map, std::span<const StagedPage> pages, bool force_direct) const;
  int64_t slots_for(int64_t slot_bytes) const;
  // Returns the manager's own staging, which it enlarges if needed. Returns null if the manager is out of
  // service. Precondition: the caller holds staging_mutex_, but not mutex_.
  std::shared_ptr<StagingBuffer> own_staging(const PageMap& map, const TransferControl& control);
  std::shared_ptr<StagingBuffer> make_staging(int64_t slots, int64_t slot_bytes) const;
  // Makes the probing reads of look_around() into temporary memory.
  void look_first(const TransferControl& control);
  // Makes the registrations of the pool that were postponed until the next transfer.
  void prepare_pool();
  // Makes the probing reads of FileIo::looks() into `buffer`. Returns an empty string, or which read did not
  // finish in time; that read then keeps the buffer alive.
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
  mutable std::mutex pool_mutex_;            // guards pool_; acquired before mutex_
  std::unique_ptr<PoolRegistrations> pool_;  // null after close()
  std::mutex staging_mutex_;                 // held by the one transfer that uses the manager's own staging
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  // The manager's own staging. Both members are set together, so that `slots` never describes a former
  // buffer.
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
