// Owns everything that one rank needs to transfer pages between files and the inference engine's pool: the
// open files, the threads that serve the files' disks, and the staging memory on one GPU or in plain memory.
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
// Unit: bytes. The default limit on staging memory. For example, 64 blocks of a 70B model take 1.25 GiB: each
// block has 128 KiB of K and 128 KiB of V in each of 80 layers.
inline constexpr int64_t kDefaultStagingBytes = int64_t{2} << 30;
// Unit: threads per disk. Each thread has one synchronous call in flight. With calls of 2 MiB, four threads
// keep an NVMe disk busy.
inline constexpr int32_t kDefaultGdsThreads = 4;

struct GdsOptions {
  int64_t round_robin = 1;  // number of consecutive blocks per device; see RawFileRule
  int32_t threads_per_device = kDefaultGdsThreads;
  bool use_staged_transfer = true;  // if false, each piece of a page is moved directly, in one call
  int32_t max_staging_blocks = kDefaultStagingBlocks;
  int64_t max_staging_bytes = kDefaultStagingBytes;
  int64_t most_transfer_bytes = INT64_MAX;  // maximum size of one transfer; limits the staging memory
  double deadline_s = 600;                  // maximum duration of one transfer, in seconds
  double stuck_s = 60;                      // in seconds; see TransferControl::stuck_s()
  RegisterPool register_pool = RegisterPool::kAuto;
  int64_t pool_piece_bytes = kPoolPieceBytes;
  IoBackend io = IoBackend::kAuto;  // for plain memory; used only if the manager makes its own I/O object
};

struct GdsTotals {
  int64_t transfers = 0;
  int64_t pages = 0;
  // Number of pages whose bytes passed through no staging slot. (Their digests may have passed through one.)
  int64_t straight_pages = 0;
  int64_t failed_pages = 0;
  int64_t io_calls = 0;
  int64_t bounced_calls = 0;
  int64_t unknown_calls = 0;
  int64_t io_bytes = 0;
  int64_t launches = 0;
};

class FLEXKV_EXPORT GDSManager {
 public:
  // The pool and the staging are in memory of `device`. The manager makes its I/O object with choose_io(), as
  // `device` and `options.io` require. Throws ConfigError if a file cannot be opened or if an option has a
  // value that is not allowed.
  GDSManager(const FilePaths& paths, const GdsOptions& options, std::shared_ptr<TransformDevice> device);
  // Uses `io`, an I/O object over `files` that the caller has made, for example a decorator. Throws
  // ConfigError if an option has a value that is not allowed, or if `options.io` is not kAuto.
  GDSManager(std::shared_ptr<const RawFiles> files, const GdsOptions& options,
             std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io);
  ~GDSManager();
  GDSManager(const GDSManager&) = delete;
  GDSManager& operator=(const GDSManager&) = delete;

  // Moves pages, and returns when none of their bytes is being moved any more. Transfers that use the
  // manager's own staging run one at a time. `staging`, if not null, is used instead of the manager's own
  // staging, and must be large enough for one block. With `force_direct`, each piece is moved directly in one
  // call, even if the options say otherwise. Throws ClosedError if the manager is closed, CapacityError if
  // staging is too small or cannot be allocated, and BlockRangeError if a file does not exist, two pages are
  // read into one block, or two pages are written to one place.
  TransferReport transfer(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                          std::shared_ptr<StagingBuffer> staging = nullptr, bool force_direct = false,
                          const TransferHooks& hooks = {});
  // Registers `region` with the I/O object if `options.register_pool` says so, so that its blocks move
  // directly between disk and pool. pool() returns whether the region was registered. Must be called before
  // reserve_staging(). Throws ClosedError if the manager is closed, and GeometryError if the region has no
  // blocks, if its blocks overlap, or if the region exceeds the address space.
  void register_pool(const PoolRegion& region);
  // Records why the blocks of a group cannot be registered. pool() returns the reason. Throws ClosedError if
  // the manager is closed.
  void refuse_pool(std::string reason);
  // Ends the pool's registrations, so that the pool's memory may be freed. The next transfer or
  // restore_pool() registers the pool again. Throws ContractError if a transfer is running. Further calls
  // have no effect.
  void release_pool();
  // Registers the pool again after release_pool().
  void restore_pool();
  PoolState pool() const;
  // Allocates the staging memory that transfers with `map` will use, so that a shortage is noticed before the
  // first transfer. Allocates none if pages like `samples` need no staging slot; the pages in `samples` are
  // not moved. The manager may make probing reads from the files to find out which routes their calls take.
  // If a disk does not answer for `stuck_s` (at most ten seconds), the manager goes out of service. Throws
  // CapacityError, whose text says which setting to change, ClosedError if the manager is closed, and
  // DiskError if it is out of service.
  void reserve_staging(const PageMap& map, std::span<const StagedPage> samples, bool force_direct = false);
  // Ends the running transfers early: pages whose I/O has not been issued yet fail as cancelled.
  void cancel();
  // Cancels the running transfers, waits for the I/O in flight, closes the files and joins the threads. I/O
  // that never finishes keeps its files open. Further calls have no effect.
  void close();

  // The files' paths, by device; available even after close().
  const FilePaths& paths() const { return paths_; }
  int32_t devices() const { return static_cast<int32_t>(paths_.size()); }
  bool has_file(int32_t device, int64_t file) const;
  const GdsOptions& options() const { return options_; }
  const TransformDevice& device() const { return *parts_.device; }
  const std::shared_ptr<TransformDevice>& device_ptr() const { return parts_.device; }
  GdsTotals totals() const;
  // Describes the I/O object and how it reaches the device's memory, for a log line.
  std::string describe() const;
  // Says why no file's calls can move bytes directly to the device's memory. Returns an empty text if some
  // file's calls can, or if some file's route is not known yet.
  std::string direct_refusal() const;
  // Why this manager is out of service; empty if it is in service.
  std::string down_reason() const;
  int64_t staging_bytes() const;
  // How the last call of reserve_staging() or transfer() divided the manager's own staging into slots; {0, 0}
  // if there is no staging.
  struct StagingSlots {
    int64_t slots = 0;
    int64_t slot_bytes = 0;
  };
  StagingSlots staging_slots() const;
  int32_t threads() const;

 private:
  class Running;
  // How pages are moved: through staging slots (kStaged), directly except for their trailers (kBeside), or
  // completely directly (kStraight).
  enum class Way { kStaged, kBeside, kStraight };
  Way way_of(const PageMap& map, std::span<const StagedPage> pages, bool force_direct) const;
  int64_t slots_for(int64_t slot_bytes) const;
  // Returns the manager's own staging, after enlarging it if necessary. Returns null if the manager is out of
  // service. Precondition: the caller holds staging_mutex_, but not mutex_.
  std::shared_ptr<StagingBuffer> own_staging(const PageMap& map, const TransferControl& control);
  std::shared_ptr<StagingBuffer> make_staging(int64_t slots, int64_t slot_bytes) const;
  // Makes the probing reads of look_around() into temporary memory.
  void look_first(const TransferControl& control);
  // Makes the registrations of the pool that were postponed until the next transfer.
  void prepare_pool();
  // Makes the probing reads of FileIo::looks() into `buffer`. Returns an empty string if all reads have
  // finished in time. Otherwise returns a text that names the read which has not; that read keeps the buffer
  // alive.
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
  // The manager's own staging. Both members are always set together, so that `slots` never describes an
  // earlier buffer.
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
