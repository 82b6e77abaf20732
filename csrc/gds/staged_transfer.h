// Moves pages between files and an engine's pool: through staging slots and one layout transform a batch, or
// straight where a page's bytes lie the same way in both.
//
// Read:  file -> slot (disks' threads) -> pool (transform, which checks digests).
// Write: pool -> slot (transform, which makes digests) -> file.
// Pages beyond the number of slots cycle through them; I/O and transforms of different pages overlap.
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
#include "gds/transform_device.h"
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
  kStopped,  // cancelled, or the deadline passed
  kIo,       // the disk refused a call, or did not answer it
  kShort,    // a call moved fewer bytes than it was asked to
  kGate,     // the gate refused the page
  kDevice,   // memory, a transform, the GPU or its driver failed: the disk had no part in it
  kDigest,   // its bytes are not those that its digests were made of
};

struct PageFailure {
  int32_t position = 0;
  Status status = Status::kFailed;
  std::string reason;
  StagedFailure cause = StagedFailure::kStopped;
};

// Looks at what lies in a page's slot beside its bytes: memory of the transfer's device. Called by the
// transfer's thread.
class PageGate {
 public:
  virtual ~PageGate() = default;
  // Of a read, when its I/O has ended: empty, or why the page must not go into the pool. (A page that goes
  // straight is there already, and counts as failed.)
  virtual std::string arrived(int32_t position, const std::byte* trailer) = 0;
  // Of a write, when its digests are in the slot: empty, or why it must not be written.
  virtual std::string digested(int32_t position, const std::byte* digests) = 0;
  // A page has ended, well or not.
  virtual void ended(int32_t position) = 0;
};

struct TransferHooks {
  PageGate* gate = nullptr;
  // What the engine's stream had been given: nothing of the pool is read or written before it is through.
  // Null: what it has been given when the transfer starts.
  StreamEvent* fence = nullptr;
};

struct TransferReport {
  std::vector<PageFailure> failures;  // ascending by position; all other pages are good
  int64_t pages = 0;
  int64_t io_calls = 0;
  int64_t bounced_calls = 0;  // those that went through another buffer
  int64_t unknown_calls = 0;  // those of which nothing says whether they did
  int64_t io_bytes = 0;
  int64_t launches = 0;
  bool staged = false;
  bool stuck = false;  // I/O into our own staging never ended: it must not be used again
  bool ok() const { return failures.empty(); }
};

// What a caller can say to a transfer under way. Pages that were not issued then end as kCancelled (cancel)
// or kFailed (deadline); a transfer returns only when none of its bytes can move any more.
class TransferControl {
 public:
  explicit TransferControl(double deadline_s, double stuck_s)
      : deadline_(deadline_in(deadline_s)), stuck_s_(stuck_s) {}
  void cancel() { cancelled_.store(true); }
  bool cancelled() const { return cancelled_.load(); }
  bool late() const { return Clock::now() >= deadline_; }
  // How long I/O may stand still before our own staging is given up for it. Direct I/O and a lent buffer are
  // waited for without end: their memory is not ours to keep.
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

// Through the slots of `staging`, at most `max_slots` of them. Pages name different blocks and different
// places. Throws CapacityError if not one slot fits.
TransferReport transfer_staged(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read,
                               const std::shared_ptr<StagingBuffer>& staging, int32_t max_slots,
                               const TransferControl& control, const TransferHooks& hooks = {});

// One call a piece, straight to the pool, with at most `max_pages` pages under way. Precondition: the map has
// pieces.
TransferReport transfer_direct(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read, int32_t max_pages,
                               const TransferControl& control, const TransferHooks& hooks = {});

// Whether every call of transfer_direct() would go straight between disk and pool.
bool can_go_direct(const FileIo& io, const PageMap& map, std::span<const StagedPage> pages);

}  // namespace flexkv
