// Moves pages between files and the inference engine's pool, either directly or through staging slots. With
// staging, a layout transform copies a batch of pages between the slots and the pool.
//
// Read: file -> slot (by the disks' threads) -> pool (by a transform, which also checks digests).
//
// Write: pool -> slot (by a transform, which also computes digests) -> file (by the disks' threads).
//
// If there are more pages than slots, slots are reused. I/O and transforms of different pages overlap.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gds/disk_threads.h"
#include "gds/file_io.h"
#include "gds/page_map.h"
#include "gds/staging_buffer.h"
#include "gds/transform/device.h"
#include "transfer/deadline.h"
#include "transfer/stream_event.h"

namespace flexkv {

// One block of the pool and its place in a file.
struct StagedPage {
  int64_t block = 0;
  int32_t device = 0;
  int64_t file = 0;
  int64_t file_offset = 0;
};

enum class StagedFailure : int32_t {
  kStopped,  // the transfer was cancelled, or its deadline had passed
  kIo,       // the disk refused a call or did not answer
  kShort,    // a call moved fewer bytes than requested
  kGate,     // the gate refused the page
  kDevice,   // the memory, a transform, the GPU or its driver failed, but not the disk
  kDigest,   // the page's bytes do not match its digests
};

struct PageFailure {
  int32_t position = 0;  // index of the page in the transfer
  Status status = Status::kFailed;
  std::string reason;
  StagedFailure cause = StagedFailure::kStopped;
};

// Inspects the trailer or the digests in a page's slot, and may refuse the page. The transfer's thread calls
// it. All pointers are to memory of the transfer's device.
class PageGate {
 public:
  virtual ~PageGate() = default;
  // Called when the I/O that reads a page has finished. Returns why the page must not be copied to the pool,
  // or an empty string if it may be. A page that was read directly is already in the pool; if the gate
  // refuses such a page, the page counts as failed.
  virtual std::string arrived(int32_t position, const std::byte* trailer) = 0;
  // Called when the digests of a page to be written are in its slot. Returns why the page must not be
  // written, or an empty string if it may be.
  virtual std::string digested(int32_t position, const std::byte* digests) = 0;
  // Called when a page has finished or failed. Not called for pages whose I/O hangs and on which the transfer
  // gave up.
  virtual void ended(int32_t position) = 0;
};

struct TransferHooks {
  PageGate* gate = nullptr;
  // A point in the inference engine's stream: no byte of the pool is read or written before the inference
  // engine's work has reached this point. If null, the transfer waits for all work that is enqueued on the
  // stream when the transfer starts.
  StreamEvent* fence = nullptr;
};

struct TransferReport {
  std::vector<PageFailure> failures;  // the failed pages, ordered by position; all other pages are good
  int64_t pages = 0;
  int64_t io_calls = 0;
  int64_t bounced_calls = 0;  // number of calls whose bytes went through another buffer
  int64_t unknown_calls = 0;  // number of calls whose bytes may have gone through another buffer
  int64_t io_bytes = 0;
  int64_t launches = 0;
  bool staged = false;
  // Whether I/O hangs in the manager's own staging memory. If so, this memory must not be used again.
  bool stuck = false;
  bool ok() const { return failures.empty(); }
};

// Lets a caller stop a running transfer. Pages whose I/O was not issued yet then fail with kCancelled (after
// cancel()) or kFailed (after the deadline). The transfer returns only when none of its bytes is being moved
// any more.
class TransferControl {
 public:
  explicit TransferControl(double deadline_s, double stuck_s)
      : deadline_(deadline_in(deadline_s)), stuck_s_(stuck_s) {}
  void cancel() { cancelled_.store(true); }
  bool cancelled() const { return cancelled_.load(); }
  bool late() const { return Clock::now() >= deadline_; }
  // Unit: seconds. If I/O makes no progress for this long, the transfer gives up and leaves its staging
  // memory to that I/O. With direct I/O or with a caller's staging buffer, the transfer waits without limit,
  // because it does not own the memory and cannot keep it alive.
  double stuck_s() const { return stuck_s_; }

 private:
  std::atomic<bool> cancelled_{false};
  Clock::time_point deadline_;
  double stuck_s_;
};

struct TransferParts {
  std::shared_ptr<FileIo> io;
  std::shared_ptr<DiskThreads> threads;
  std::shared_ptr<TransformDevice> device;
};

// Moves pages through at most `max_slots` slots of `staging`. Precondition: no two pages have the same target
// (the block in a read, the place in a file in a write). Throws CapacityError if `staging` is smaller than
// one slot.
TransferReport transfer_staged(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read,
                               const std::shared_ptr<StagingBuffer>& staging, int32_t max_slots,
                               const TransferControl& control, const TransferHooks& hooks = {});

// Moves pages directly between files and pool, with one call per piece and at most `max_pages` pages in
// flight. Precondition: the map has pieces.
TransferReport transfer_direct(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read, int32_t max_pages,
                               const TransferControl& control, const TransferHooks& hooks = {});

// Returns whether every call that transfer_direct() would make for these pages is known to be direct. With
// `unknown_too`, calls of unknown route also count as direct.
bool can_go_direct(const FileIo& io, const PageMap& map, std::span<const StagedPage> pages,
                   bool unknown_too = false);

}  // namespace flexkv
