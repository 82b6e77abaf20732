#include "gds/staged_transfer.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "gds/page_io.h"

namespace flexkv {
namespace {

// Unit: seconds. A waiting transfer checks at this interval whether it was cancelled.
constexpr double kCancelLookS = 0.02;

// One transfer, which runs in its caller's thread. Each page passes through these states:
//   read:  waiting -> I/O -> ready -> transform -> ended
//   write: waiting -> ready -> transform -> I/O -> ended
// Pages that are moved directly go from waiting to I/O to ended. A page has a slot from the time it leaves
// `waiting` until it is `ended`.
class Transfer {
 public:
  Transfer(const TransferParts& parts, const PageMap& map, std::span<const StagedPage> pages, bool is_read,
           const TransferControl& control, const TransferHooks& hooks)
      : parts_(parts),
        map_(map),
        pages_(pages),
        is_read_(is_read),
        control_(control),
        hooks_(hooks),
        io_(parts) {
    report_.pages = static_cast<int64_t>(pages.size());
    slot_of_.assign(pages.size(), 0);
    ended_.assign(pages.size(), 0);
  }

  void use_staging(const std::shared_ptr<StagingBuffer>& staging, int32_t max_slots) {
    staging_ = staging;
    report_.staged = !map_.in_place();
    const int32_t slots = std::min({staging->slots_of(map_.slot_bytes()), std::max(max_slots, 1),
                                    static_cast<int32_t>(std::max<size_t>(pages_.size(), 1))});
    // The lowest slot is used first, and the slot that was freed last is reused first, so that a few slots
    // stay in the caches.
    for (int32_t slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
    batch_pages_ = std::clamp(parts_.device->batch_pages(slots), 1, slots);
    transformer_ = parts_.device->transformer(map_, is_read_, batch_pages_, hooks_.fence);
  }
  void go_direct(int32_t max_pages) {
    for (int32_t i = 0; i < max_pages; ++i) free_.push_back(i);
  }

  TransferReport run() {
    try {
      // I/O directly between disk and pool cannot wait on a stream, so this thread itself waits for the work
      // of the inference engine.
      const bool straight = !staging_ || map_.in_place();
      const std::string error = straight ? parts_.device->await_engine(hooks_.fence) : std::string();
      if (!error.empty()) fail_all("the engine's work before it failed: " + error);
      drive();
    } catch (...) {
      drain();  // after run() throws, the caller may reuse its blocks at once, so no I/O may be in flight
      throw;
    }
    std::sort(report_.failures.begin(), report_.failures.end(),
              [](const PageFailure& a, const PageFailure& b) { return a.position < b.position; });
    return std::move(report_);
  }

 private:
  void drive() {
    last_moved_ = Clock::now();
    while (ended_count_ < pages_.size()) {
      if (!stopped_ && (control_.cancelled() || control_.late())) stop();
      admit();
      launch();
      // Nothing else can go on until a batch or some I/O finishes.
      if (!batches_.empty() && (batches_.size() >= kBatchesInFlight || ready_.empty())) {
        collect(0);
        retire_batch();
      } else {
        collect(ready_.empty() && io_.in_flight() > 0 ? kCancelLookS : 0);
        if (give_up()) break;
      }
    }
  }

  void fail_all(const std::string& reason) {
    for (; next_ < pages_.size(); ++next_) {
      fail(static_cast<int32_t>(next_), Status::kFailed, StagedFailure::kDevice, reason, false);
    }
  }

  void drain() {
    for (; !batches_.empty(); batches_.pop_front()) transformer_->wait();
    while (io_.in_flight() > 0) io_.take_ended(kCancelLookS);
  }

  void stop() {
    stopped_ = control_.cancelled() ? Status::kCancelled : Status::kFailed;
    while (next_ < pages_.size()) fail_stopped(static_cast<int32_t>(next_++), false);
    while (!ready_.empty()) {
      fail_stopped(ready_.front(), true);
      ready_.pop_front();
    }
  }

  void admit() {
    while (next_ < pages_.size() && !free_.empty()) {
      const auto position = static_cast<int32_t>(next_++);
      slot_of_[static_cast<size_t>(position)] = free_.back();
      free_.pop_back();
      if (is_read_ || !staging_) {
        submit(position);
      } else {
        ready_.push_back(position);
      }
    }
  }

  void submit(int32_t position) {
    const StagedPage& page = pages_[static_cast<size_t>(position)];
    PageJob job;
    if (!staging_ || map_.in_place()) {
      for (const DirectPiece& piece : map_.pieces()) {
        job.calls.push_back({!is_read_, page.device, page.file, page.file_offset + piece.page_offset,
                             reinterpret_cast<void*>(run_address(piece, page.block)), piece.run_bytes});
      }
    }
    job.together = job.calls.size();
    // If this transfer writes the digests, their calls come last. So if a write fails earlier, the slot has
    // an image that no read accepts.
    if (staging_) {
      job.staging = staging_;
      for (const FileExtent& extent : map_.extents()) {
        job.calls.push_back({!is_read_, page.device, page.file, page.file_offset + extent.file_offset,
                             slot(position) + extent.slot_offset, extent.bytes});
      }
    }
    if (is_read_) job.together = job.calls.size();
    io_.submit(position, std::move(job));
  }

  std::byte* slot(int32_t position) const {
    return staging_->slot(slot_of_[static_cast<size_t>(position)], map_.slot_bytes());
  }

  void launch() {
    while (!ready_.empty() && batches_.size() < kBatchesInFlight) {
      std::vector<TransformPage> batch;
      std::vector<int32_t> positions;
      while (!ready_.empty() && static_cast<int32_t>(positions.size()) < batch_pages_) {
        const int32_t position = ready_.front();
        ready_.pop_front();
        positions.push_back(position);
        batch.push_back(
            {reinterpret_cast<uintptr_t>(slot(position)), pages_[static_cast<size_t>(position)].block});
      }
      transformer_->launch(batch);
      report_.launches += 1;
      batches_.push_back(std::move(positions));
    }
  }

  void retire_batch() {
    const BatchResult result = transformer_->wait();
    const std::vector<int32_t> positions = std::move(batches_.front());
    batches_.pop_front();
    last_moved_ = Clock::now();
    for (size_t i = 0; i < positions.size(); ++i) {
      const int32_t position = positions[i];
      if (!result.error.empty()) {
        fail(position, Status::kFailed, StagedFailure::kDevice, "layout transform: " + result.error);
      } else if (result.bad_run[i] != kNoBadRun) {
        const auto bad = static_cast<size_t>(result.bad_run[i]);
        const Segment& run = map_.runs()[bad];
        fail(position, Status::kFailed, StagedFailure::kDigest,
             "digest mismatch in run " + std::to_string(map_.first_run() + bad) + " (layer " +
                 std::to_string(run.layer) + ")");
      } else if (is_read_) {
        end(position);
      } else if (stopped_) {
        fail_stopped(position, true);
      } else if (const std::string why = pass(position); !why.empty()) {
        fail(position, Status::kFailed, StagedFailure::kGate, why);
      } else {
        submit(position);
      }
    }
  }

  // Asks the gate whether a page may pass. Returns why the gate refuses the page, or an empty string if the
  // page may pass.
  std::string pass(int32_t position) {
    if (hooks_.gate == nullptr || !staging_) return {};
    return is_read_ ? hooks_.gate->arrived(position, slot(position) + map_.trailer_offset())
                    : hooks_.gate->digested(position, slot(position) + map_.digest_offset());
  }

  void collect(double wait_s) {
    for (PageIoResult& result : io_.take_ended(wait_s)) {
      last_moved_ = Clock::now();
      report_.io_calls += result.calls;
      report_.bounced_calls += result.bounced;
      report_.unknown_calls += result.unknown;
      report_.io_bytes += result.bytes;
      if (!result.error.empty()) {
        fail(result.position, Status::kFailed, result.cause, std::move(result.error));
      } else if (!staging_ || !is_read_) {
        end(result.position);
      } else if (stopped_) {
        fail_stopped(result.position, true);
      } else if (const std::string why = pass(result.position); !why.empty()) {
        fail(result.position, Status::kFailed, StagedFailure::kGate, why);
      } else {
        ready_.push_back(result.position);
      }
    }
  }

  // If I/O hangs and the transfer must end without it, records the remaining pages as failed and returns
  // true. The I/O that hangs keeps the staging memory alive and does not touch the inference engine's memory.
  bool give_up() {
    if (!staging_ || staging_->lent() || map_.in_place() || io_.in_flight() == 0 || !batches_.empty() ||
        seconds_since(last_moved_) < control_.stuck_s()) {
      return false;
    }
    report_.stuck = true;
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (!ended_[i]) {
        report_.failures.push_back({static_cast<int32_t>(i), Status::kFailed,
                                    "I/O has not ended for " + std::to_string(control_.stuck_s()) + " s",
                                    StagedFailure::kIo});
      }
    }
    return true;
  }

  void fail_stopped(int32_t position, bool holds_slot) {
    const bool cancelled = *stopped_ == Status::kCancelled;
    fail(position, *stopped_, StagedFailure::kStopped, cancelled ? "cancelled" : "the deadline has passed",
         holds_slot);
  }
  void fail(int32_t position, Status status, StagedFailure cause, std::string reason,
            bool holds_slot = true) {
    report_.failures.push_back({position, status, std::move(reason), cause});
    end(position, holds_slot);
  }
  void end(int32_t position, bool holds_slot = true) {
    if (holds_slot) free_.push_back(slot_of_[static_cast<size_t>(position)]);
    ended_[static_cast<size_t>(position)] = 1;
    ended_count_ += 1;
    if (hooks_.gate != nullptr) hooks_.gate->ended(position);
  }

  const TransferParts& parts_;
  const PageMap& map_;
  std::span<const StagedPage> pages_;
  const bool is_read_;
  const TransferControl& control_;
  const TransferHooks hooks_;
  PageIo io_;
  std::shared_ptr<StagingBuffer> staging_;
  std::unique_ptr<Transformer> transformer_;
  int32_t batch_pages_ = 1;
  TransferReport report_;
  std::vector<int32_t> free_;
  std::vector<int32_t> slot_of_;
  std::vector<char> ended_;
  std::deque<int32_t> ready_;  // pages whose slots wait for a transform (the copy between slot and pool)
  std::deque<std::vector<int32_t>> batches_;  // batches in flight, oldest first
  size_t next_ = 0;
  size_t ended_count_ = 0;
  std::optional<Status> stopped_;
  Clock::time_point last_moved_;
};

}  // namespace

TransferReport transfer_staged(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read,
                               const std::shared_ptr<StagingBuffer>& staging, int32_t max_slots,
                               const TransferControl& control, const TransferHooks& hooks) {
  Transfer transfer(parts, map, pages, is_read, control, hooks);
  transfer.use_staging(staging, max_slots);
  return transfer.run();
}

TransferReport transfer_direct(const TransferParts& parts, const PageMap& map,
                               std::span<const StagedPage> pages, bool is_read, int32_t max_pages,
                               const TransferControl& control, const TransferHooks& hooks) {
  Transfer transfer(parts, map, pages, is_read, control, hooks);
  transfer.go_direct(std::max(max_pages, 1));
  return transfer.run();
}

bool can_go_direct(const FileIo& io, const PageMap& map, std::span<const StagedPage> pages,
                   bool unknown_too) {
  if (map.pieces().empty()) return false;
  return std::all_of(pages.begin(), pages.end(), [&](const StagedPage& page) {
    return std::all_of(map.pieces().begin(), map.pieces().end(), [&](const DirectPiece& piece) {
      const IoRoute route =
          io.route({false, page.device, page.file, page.file_offset + piece.page_offset,
                    reinterpret_cast<void*>(run_address(piece, page.block)), piece.run_bytes});
      return route == IoRoute::kDirect || (unknown_too && route == IoRoute::kUnknown);
    });
  });
}

}  // namespace flexkv
