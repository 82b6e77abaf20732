// A disk's I/O thread. It decides which page to begin next, and when to verify the pages that were read.
#include <chrono>
#include <exception>
#include <unordered_set>
#include <utility>

#include "base/nvtx.h"
#include "io/thread_queue.h"
#include "storage/disk.h"

namespace flexkv {
namespace {

// Unit: I/Os. When this many consecutive reads have overtaken a waiting write, the write is begun next.
constexpr int32_t kReadsBeforeWrite = 16;
// Unit: bytes. The maximum number of bytes in flight on one disk: kMostBytesInFlight if all of them belong to
// reads, kMostWritesInFlight if some belong to writes. 16 pages of 2 MiB keep an NVMe drive at its full speed
// (on the measured drive, 32 pages are no faster). A read behind 32 MiB of writes waits about 10 ms at 3
// GB/s. If there are only reads, twice as many bytes may be in flight: a page gains nothing by waiting
// outside the disk's queue, and more pages in the queue keep the disk busy while this thread does not run.
constexpr int64_t kMostBytesInFlight = int64_t{64} << 20;
constexpr int64_t kMostWritesInFlight = int64_t{32} << 20;
// Unit: bytes. After the thread has sealed pages with this many bytes, it calls IoQueue::take(), so that the
// queue passes these pages on to the disk before more pages are sealed. Sealing this much takes 0.1 ms. So
// there is one call per large page, or per 16 pages of 64 KiB.
constexpr int64_t kSealedBytesHeldBack = int64_t{1} << 20;
// Unit: bytes. How many bytes the thread verifies before it serves the queue again. Verifying them takes 0.1
// ms at 10 GB/s. They are few compared with the bytes in flight.
constexpr int64_t kCheckedBytesInRow = int64_t{1} << 20;
// A disk counts as idle if it has had no task for this long. Shorter gaps occur within a burst of loads.
constexpr std::chrono::milliseconds kIdleBeforeZeroFill{50};

}  // namespace

void Disk::note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  backend_note_ += (backend_note_.empty() ? "" : "; ") + text;
}

// Returns the memory of all host pools, one part per extent. Returns an empty list if the option
// register_buffers is off.
IoMemories Disk::host_memory() {
  IoMemories memories;
  if (!options_.register_buffers) return memories;
  std::unordered_set<const HostPool*> seen;  // groups that share slabs share a pool
  for (const DiskGroup& group : *groups_) {
    if (!seen.insert(group.pool.get()).second) continue;
    const ExtentTable& extents = group.pool->extents();
    for (int64_t extent = 0; extent < extents.count; ++extent) {
      const int64_t first = extent * extents.slots_per_extent;
      const int64_t end = first + extents.slots_of(extent);
      memories.parts.push_back({group.pool->slot_address(first), (end - first) * extents.geometry.slot_bytes,
                                [pool = group.pool, end] { return pool->ready_slots() >= end; }});
    }
  }
  memories.refused = [this](const std::string& reason) { note("buffers are not registered: " + reason); };
  return memories;
}

std::unique_ptr<IoQueue> Disk::make_queue() {
  std::unique_ptr<IoQueue> queue = make_io_queue(options_.io, options_.depth, host_memory());
  if (options_.io == IoBackend::kAuto) {
    if (const std::string refusal = uring_refusal(); !refusal.empty()) note("no io_uring: " + refusal);
  }
  const std::string backend = queue->name();
  if (backend == "threads" && options_.depth > kMostIoThreads) {
    note(std::to_string(kMostIoThreads) +
         " reads and writes at once, where disk.depth = " + std::to_string(options_.depth) + " allows more");
  }
  {
    const std::lock_guard lock(mutex_);
    backend_ = backend;
  }
  return wrap_ ? wrap_(std::move(queue), number_) : std::move(queue);
}

void Disk::run(const std::shared_ptr<WorkSource>& source) {
  // Destroyed only after the try block, so that no thread wakes a destroyed queue.
  std::unique_ptr<IoQueue> queue;
  try {
    queue = make_queue();
    work(*queue, *source);
    zero_fill_.reset();  // releases ZeroFill's references to the files
    const std::lock_guard lock(mutex_);
    queue_ = nullptr;
  } catch (const std::exception& error) {
    // I/Os in flight may still move bytes, and no thread will notice when they finish. So the pages of these
    // I/Os are never reported, and the pages' slots stay pinned forever.
    {
      const std::lock_guard lock(mutex_);
      queue_ = nullptr;
    }
    take_out(error.what(), source.get());
    zero_fill_.reset();
    std::vector<Ended> ended;
    while (!arrived_.empty()) end_arrived(ended);
    report(ended, *source);
  }
}

void Disk::work(IoQueue& queue, WorkSource& source) {
  if (options_.zero_fill) zero_fill_.emplace(slabs_);
  std::vector<IoDone> done;
  std::vector<Ended> ended;
  for (;;) {
    uint64_t pushes = 0;
    {
      const std::lock_guard lock(mutex_);
      pushes = pushes_;
    }
    ended.clear();
    begin_picked(queue, ended);
    report(ended, source);
    submit_ios(queue);
    note_oldest();
    if (running_jobs_ == 0 && arrived_.empty()) {
      if (!wait_for_tasks()) return;
      continue;
    }
    done.clear();
    if (arrived_.empty()) {
      {
        const std::lock_guard lock(mutex_);
        // A push() before queue_ is set does not end wait(), so the loop checks again.
        if (pushes != pushes_) continue;
        queue_ = &queue;
      }
      queue.wait(done);
    } else {
      // While the thread verifies pages, the disk works on the I/Os that were just submitted.
      queue.take(done);
      ended.clear();
      end_arrived(ended);
      report(ended, source);
    }
    for (const IoDone& one : done) io_done(one);
    if (!pending_out_.empty()) take_out(std::exchange(pending_out_, {}), &source);
  }
}

void Disk::note_oldest() {
  uint64_t oldest = 0;
  for (const Job& job : jobs_) {
    if (job.open_ios > 0 && (oldest == 0 || job.sequence < oldest)) oldest = job.sequence;
  }
  oldest_.store(oldest, std::memory_order_relaxed);
}

// Waits for tasks while nothing is in flight, and writes zeros while the disk is idle. Returns false if the
// disk was stopped and no task is left.
bool Disk::wait_for_tasks() {
  std::unique_lock lock(mutex_);
  queue_ = nullptr;
  const auto called = [this] { return stopping_ || !reads_.empty() || !writes_.empty(); };
  while (zero_fill_ && !lost_ && !work_.wait_for(lock, kIdleBeforeZeroFill, called)) {
    int64_t written = 1;
    while (written > 0 && !called() && !lost_) {
      zero_filling_ = true;
      lock.unlock();
      oldest_.store(next_sequence_++,
                    std::memory_order_relaxed);  // a write of zeros may hang like any other I/O
      written = zero_fill_->step();
      oldest_.store(0, std::memory_order_relaxed);
      if (written > 0) counts_.zeroed_bytes += written;
      lock.lock();
      zero_filling_ = false;
      zero_filled_.notify_all();
    }
    // If a write of zeros failed, no more zeros are written. Pages can do without zeros, and errors of the
    // disk will show in the pages' own I/O.
    if (written < 0) zero_fill_.reset();
    if (written == 0) break;
  }
  work_.wait(lock, called);
  return !reads_.empty() || !writes_.empty();
}

void Disk::begin_picked(IoQueue& queue, std::vector<Ended>& ended) {
  PageTask task;
  bool picked = false;
  int64_t held_back = 0;
  std::vector<IoDone> done;
  while (pick(task)) {
    picked = true;
    const bool write = task.move.kind == OpKind::kDiskWrite;
    if (full_ && task.move.kind != OpKind::kDiskRead && Clock::now() < full_until_ && !has_space(task)) {
      add(ended, task, write_failed(task, full_reason()));
      continue;
    }
    try {
      begin(task);
    } catch (const std::exception& error) {
      add(ended, task, {Status::kFailed, error.what(), {}, FailureCause::kTransport});
      continue;
    }
    submit_ios(queue);
    // Sealing more pages takes time. take() passes the I/Os that have been submitted so far on to the disk,
    // so that the disk works in the meantime.
    held_back += write ? (*groups_)[static_cast<size_t>(task.move.group)].codec->image_bytes() : 0;
    if (held_back < kSealedBytesHeldBack) continue;
    held_back = 0;
    queue.take(done);
    for (const IoDone& one : done) io_done(one);
    done.clear();
  }
  if (picked) on_change_();
}

// Removes from the queue the next task that may begin now, and writes it to `task`. Returns false if there is
// none.
bool Disk::pick(PageTask& task) {
  if (running_jobs_ == options_.depth || free_jobs_.empty()) return false;
  const std::lock_guard lock(mutex_);
  // If there are only writes, they may use the full depth. A read that is queued later still waits only for a
  // limited time, because the bytes in flight are limited, too.
  const bool only_writes = reads_.empty() && running_writes_ == running_jobs_;
  const int32_t most_writes = only_writes ? options_.depth : (options_.depth + 1) / 2;
  const bool write_waits = !writes_.empty() && running_writes_ < most_writes;
  const bool write_first = write_waits && (reads_.empty() || reads_in_row_ >= kReadsBeforeWrite);
  if (!write_first && reads_.empty()) return false;
  std::deque<PageTask>& from = write_first ? writes_ : reads_;
  const DiskGroup& group = (*groups_)[static_cast<size_t>(from.front().move.group)];
  const int64_t most = write_first || running_writes_ > 0 ? kMostWritesInFlight : kMostBytesInFlight;
  if (running_jobs_ > 0 && running_bytes_ + group.codec->image_bytes() > most) return false;
  reads_in_row_ = !write_first && write_waits ? reads_in_row_ + 1 : 0;
  task = std::move(from.front());
  from.pop_front();
  return true;
}

void Disk::submit_ios(IoQueue& queue) {
  const nvtx::Range range("flexkv disk submit");
  while (!unsubmitted_.empty() && in_flight_ < options_.depth) {
    queue.submit(ios_[unsubmitted_.front()].request);
    unsubmitted_.pop_front();
    ++in_flight_;
  }
}

void Disk::io_done(const IoDone& done) {
  const auto io = static_cast<size_t>(done.cookie);
  const size_t at = ios_[io].job;
  Job& job = jobs_[at];
  const int64_t wanted = ios_[io].request.bytes;
  free_ios_.push_back(io);
  --in_flight_;
  if (done.result < 0) {
    if (job.error == 0) job.error = static_cast<int32_t>(-done.result);
  } else {
    job.missing += wanted - done.result;
  }
  if (--job.open_ios > 0) return;
  --running_jobs_;
  running_writes_ -= job.write ? 1 : 0;
  running_bytes_ -= job.bytes;
  arrived_.push_back(at);
}

// Finishes jobs in the order in which their I/Os finished, and appends their pages to `ended`. Stops after
// verifying kCheckedBytesInRow bytes: if it went on, the disk could run out of I/Os.
void Disk::end_arrived(std::vector<Ended>& ended) {
  const nvtx::Range range("flexkv disk verify");
  int64_t checked = 0;
  while (!arrived_.empty() && checked < kCheckedBytesInRow) {
    const size_t at = arrived_.front();
    arrived_.pop_front();
    Job& job = jobs_[at];
    if (!job.write) checked += job.bytes;
    MoveResult result;
    try {
      result = end(job);
    } catch (const std::exception& error) {
      result = {Status::kFailed, error.what()};
    }
    add(ended, job.task, std::move(result));
    job = Job{};
    free_jobs_.push_back(at);
  }
}

}  // namespace flexkv
