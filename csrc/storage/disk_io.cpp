// A disk's I/O thread.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "storage/disk.h"

namespace flexkv {
namespace {

// Unit: I/Os. After so many reads in a row that a waiting write had to let pass, it gets one.
constexpr int32_t kReadsBeforeWrite = 16;
// Unit: bytes. Under way on one disk. 16 pages of 2 MiB keep an NVMe drive at its full speed (the same as 32
// on the drive measured), and a read that comes behind that much of writes waits about 10 ms at 3 GB/s.
// Behind reads nothing is gained by waiting outside, and more of them bridge the times when this thread does
// not run.
constexpr int64_t kMostBytesUnderWay = int64_t{64} << 20;
constexpr int64_t kMostWritesUnderWay = int64_t{32} << 20;
// Unit: I/Os that failed in a row. A bad sector fails alone; a bad disk fails all.
constexpr int32_t kReadErrorsBeforeOut = 8;
constexpr int32_t kWriteErrorsBeforeOut = 3;

// Errors that no other slot of the file system would be spared.
bool is_final(int32_t error) {
  return error == ENOSPC || error == EDQUOT || error == EROFS || error == ENODEV || error == ENXIO ||
         error == EBADF || error == EFBIG;
}
// Unit: bytes. Sealed pages that wait before the queue is told of them: 0.1 ms of sealing, a call each for
// large pages and one for 16 of 64 KiB.
constexpr int64_t kSealedBytesHeldBack = int64_t{1} << 20;
// Unit: bytes. Checked before the queue is looked after again: 0.1 ms at 10 GB/s, a fortieth of what is under
// way.
constexpr int64_t kCheckedBytesInRow = int64_t{1} << 20;
// A disk that was not asked for anything for so long is idle; loads come in bursts.
constexpr std::chrono::milliseconds kIdleBeforeZeroFill{50};

const LayerReads& layers_of(const DiskGroup& group, const Piece& piece) {
  const auto found = std::find_if(group.layer_reads.begin(), group.layer_reads.end(),
                                  [&](const LayerReads& reads) { return reads.lo == piece.layer_lo(); });
  if (found == group.layer_reads.end() || found->hi != piece.layer_hi()) {
    throw ContractError("layers [" + std::to_string(piece.layer_lo()) + ", " +
                        std::to_string(piece.layer_hi()) + ") are no range that a disk reads");
  }
  return *found;
}

uint64_t unix_now() { return static_cast<uint64_t>(std::time(nullptr)); }

}  // namespace

void Disk::note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  backend_note_ += (backend_note_.empty() ? "" : "; ") + text;
}

// The extents of every group's host pool.
IoMemories Disk::host_memory() {
  IoMemories memories;
  if (!options_.register_buffers) return memories;
  for (const DiskGroup& group : *groups_) {
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
  {
    const std::lock_guard lock(mutex_);
    backend_ = queue->name();
  }
  return wrap_ ? wrap_(std::move(queue), number_) : std::move(queue);
}

void Disk::run(const std::shared_ptr<WorkSource>& source) {
  std::unique_ptr<IoQueue> queue;  // out here, so that nobody wakes one that is gone
  try {
    queue = make_queue();
    work(*queue, *source);
    zero_fill_.reset();  // it has files of its own
    const std::lock_guard lock(mutex_);
    queue_ = nullptr;
  } catch (const std::exception& error) {
    // What is under way may still move and is never heard of again: its slots stay leased for good.
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
        if (pushes != pushes_) continue;  // it would not be woken for them
        queue_ = &queue;
      }
      queue.wait(done);
    } else {
      // While these are checked the disk works on what was submitted, and on nothing less than it can hold.
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

// With nothing under way: until there are tasks. False when there will be none.
bool Disk::wait_for_tasks() {
  std::unique_lock lock(mutex_);
  queue_ = nullptr;
  const auto called = [this] { return stopping_ || !reads_.empty() || !writes_.empty(); };
  while (zero_fill_ && !lost_ && !work_.wait_for(lock, kIdleBeforeZeroFill, called)) {
    int64_t written = 1;
    while (written > 0 && !called() && !lost_) {
      zero_filling_ = true;
      lock.unlock();
      oldest_.store(next_sequence_++, std::memory_order_relaxed);  // it may hang as any other I/O
      written = zero_fill_->step();
      oldest_.store(0, std::memory_order_relaxed);
      if (written > 0) counts_.zeroed_bytes += written;
      lock.lock();
      zero_filling_ = false;
      zero_filled_.notify_all();
    }
    // Pages can do without it, and find out what is wrong with the disk.
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
    try {
      begin(task);
    } catch (const std::exception& error) {
      add(ended, task, {Status::kFailed, error.what(), {}, Blame::kWay});
      continue;
    }
    submit_ios(queue);
    // Sealing takes time in which the disk can work already.
    held_back += write ? (*groups_)[static_cast<size_t>(task.move.group)].codec->image_bytes() : 0;
    if (held_back < kSealedBytesHeldBack) continue;
    held_back = 0;
    queue.take(done);
    for (const IoDone& one : done) io_done(one);
    done.clear();
  }
  if (picked) on_change_();
}

// The next task that may begin now.
bool Disk::pick(PageTask& task) {
  if (running_jobs_ == options_.depth || free_jobs_.empty()) return false;
  const std::lock_guard lock(mutex_);
  // Alone they have the whole depth; a read that comes then finds the bytes under way bounded all the same.
  const bool only_writes = reads_.empty() && running_writes_ == running_jobs_;
  const int32_t most_writes = only_writes ? options_.depth : (options_.depth + 1) / 2;
  const bool write_waits = !writes_.empty() && running_writes_ < most_writes;
  const bool write_first = write_waits && (reads_.empty() || reads_in_row_ >= kReadsBeforeWrite);
  if (!write_first && reads_.empty()) return false;
  std::deque<PageTask>& from = write_first ? writes_ : reads_;
  const DiskGroup& group = (*groups_)[static_cast<size_t>(from.front().move.group)];
  const int64_t most = write_first || running_writes_ > 0 ? kMostWritesUnderWay : kMostBytesUnderWay;
  if (running_jobs_ > 0 && running_bytes_ + group.codec->image_bytes() > most) return false;
  reads_in_row_ = !write_first && write_waits ? reads_in_row_ + 1 : 0;
  task = std::move(from.front());
  from.pop_front();
  return true;
}

void Disk::add_io(size_t job, bool write, std::byte* buffer, int64_t bytes, int64_t image_offset) {
  const SlabFile& slab = *slabs_[static_cast<size_t>(jobs_[job].task.move.group)];
  // Whatever the geometry, nothing else may reach the kernel: ext4 takes it, slowly and through its cache.
  if (reinterpret_cast<uintptr_t>(buffer) % kIoAlignBytes != 0 || bytes % kIoAlignBytes != 0 ||
      image_offset % kIoAlignBytes != 0) {
    throw ContractError("an I/O that is not on 4 KiB boundaries");
  }
  const int64_t offset = slab.offset(jobs_[job].task.slot) + image_offset;
  if (free_ios_.empty()) {  // only a layer read has several, a few for each rank
    free_ios_.push_back(ios_.size());
    ios_.emplace_back();
  }
  const size_t io = free_ios_.back();
  free_ios_.pop_back();
  ios_[io] = {job, {write, slab.fd(), buffer, bytes, offset, io}};
  unsubmitted_.push_back(io);
  ++jobs_[job].open_ios;
  jobs_[job].bytes += bytes;
}

// Throws before anything was submitted.
void Disk::begin(const PageTask& task) {
  const size_t at = free_jobs_.back();
  Job& job = jobs_[at];
  job = Job{};
  job.group = &(*groups_)[static_cast<size_t>(task.move.group)];
  job.write = task.move.kind != OpKind::kDiskRead;
  job.task = task;
  const PageCodec& codec = *job.group->codec;
  std::byte* image = job.task.move.slot < 0 ? nullptr : job.group->pool->slot_address(job.task.move.slot);
  if (task.move.kind == OpKind::kDiskSeal) {
    begin_seal(at);
  } else if (job.write) {
    const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
    codec.seal(image, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
               PageTag::read(job.task.move.tag), unix_now());
    add_io(at, true, image, codec.image_bytes(), 0);
  } else if (job.task.piece->layer_lo() == 0 && job.task.piece->layer_hi() == codec.layers()) {
    add_io(at, false, image, codec.image_bytes(), 0);
  } else {
    begin_layers(at);
  }
  free_jobs_.pop_back();
  job.sequence = next_sequence_++;
  ++running_jobs_;
  running_writes_ += job.write ? 1 : 0;
  running_bytes_ += job.bytes;
}

// The trailer alone: others have written the stripes, and told what they wrote by its digests.
void Disk::begin_seal(size_t at) {
  Job& job = jobs_[at];
  const PageCodec& codec = *job.group->codec;
  const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
  const auto bytes = static_cast<size_t>(codec.trailer_area_bytes());
  auto* trailer = static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(kIoAlignBytes), bytes));
  if (trailer == nullptr) throw CapacityError("no memory to seal a page");
  job.bounce = {trailer, std::free};
  std::memset(trailer, 0, bytes);
  std::memcpy(trailer + kTrailerHeadBytes, job.task.move.digests.data(), job.task.move.digests.size_bytes());
  codec.seal_trailer(trailer, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
                     PageTag::read(job.task.move.tag), unix_now());
  add_io(at, true, trailer, codec.trailer_area_bytes(), codec.image().trailer_offset());
}

// A range of layers, and with the first one the trailer, which the later ones then find in the slot.
void Disk::begin_layers(size_t at) {
  Job& job = jobs_[at];
  const PageCodec& codec = *job.group->codec;
  const LayerReads& layers = layers_of(*job.group, *job.task.piece);
  job.layers = &layers;
  std::byte* image = job.group->pool->slot_address(job.task.move.slot);
  int64_t total = 0;
  for (const ImageSpan& span : layers.spans) total += span.bytes;
  std::byte* bounce = nullptr;
  if (!layers.alone) {
    bounce = static_cast<std::byte*>(
        std::aligned_alloc(static_cast<size_t>(kIoAlignBytes), static_cast<size_t>(total)));
    if (bounce == nullptr) throw CapacityError("no memory to read layers");
    job.bounce = {bounce, std::free};
  }
  if (layers.lo == 0) {
    const int64_t trailer = codec.image().trailer_offset();
    add_io(at, false, image + trailer, codec.image_bytes() - trailer, trailer);
  }
  for (const ImageSpan& span : layers.spans) {
    std::byte* to = bounce == nullptr ? image + span.offset : bounce;
    if (bounce != nullptr) bounce += span.bytes;
    job.span_at.push_back(to);
    add_io(at, false, to, span.bytes, span.offset);
  }
}

void Disk::submit_ios(IoQueue& queue) {
  while (!unsubmitted_.empty() && under_way_ < options_.depth) {
    queue.submit(ios_[unsubmitted_.front()].request);
    unsubmitted_.pop_front();
    ++under_way_;
  }
}

void Disk::io_done(const IoDone& done) {
  const auto io = static_cast<size_t>(done.cookie);
  const size_t at = ios_[io].job;
  Job& job = jobs_[at];
  const int64_t wanted = ios_[io].request.bytes;
  free_ios_.push_back(io);
  --under_way_;
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

// The oldest of those that have arrived, as much of them as is checked while the disk works off what it has.
void Disk::end_arrived(std::vector<Ended>& ended) {
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

// What an I/O error means for the disk as a whole.
void Disk::disk_error(bool write, int32_t error) {
  int32_t& in_row = write ? write_errors_in_row_ : read_errors_in_row_;
  ++in_row;
  const int32_t most = write ? kWriteErrorsBeforeOut : kReadErrorsBeforeOut;
  if (!is_final(error) && in_row < most) return;
  const std::string what = error != 0 ? std::strerror(error) : "it moved less than was asked for";
  pending_out_ = std::string(write ? "write" : "read") + ": " + what +
                 (is_final(error) ? "" : ", " + std::to_string(in_row) + " times in a row");
}

MoveResult Disk::miss(const Job& job, const PageCheck& check) {
  ++counts_.misses[static_cast<size_t>(check.miss)];
  return {Status::kFailed,
          std::string("disk miss (") + kMissNames[static_cast<size_t>(check.miss)] + ") at place " +
              std::to_string(job.task.move.place) + ": " + check.reason,
          {},
          blame_of(check.miss)};
}

MoveResult Disk::end(Job& job) {
  if (!job.write) return end_read(job);
  if (job.error == 0 && job.missing == 0) {
    write_errors_in_row_ = 0;
    if (lost()) return lost_result();
    ++counts_.written_pages;
    counts_.written_bytes += job.bytes;
    if (zero_fill_) zero_fill_->wrote(static_cast<size_t>(job.task.move.group), job.task.slot);
    return {};
  }
  ++counts_.write_errors;
  disk_error(true, job.error);
  const std::string what =
      job.error != 0 ? std::strerror(job.error) : std::to_string(job.missing) + " bytes were not written";
  return {Status::kFailed,
          "disk write at place " + std::to_string(job.task.move.place) + ": " + what,
          {},
          Blame::kDisk};
}

MoveResult Disk::end_read(Job& job) {
  if (job.error != 0 || job.missing != 0) {
    disk_error(false, job.error);
    if (job.error != 0) return miss(job, {PageMiss::kIo, std::strerror(job.error)});
    return miss(job, {PageMiss::kShort, std::to_string(job.missing) + " bytes are missing"});
  }
  read_errors_in_row_ = 0;
  const PageCheck found = check(job, job.group->pool->slot_address(job.task.move.slot));
  if (found.miss != PageMiss::kNone) return miss(job, found);
  counts_.read_bytes += job.bytes;
  if (job.task.piece->layer_hi() == job.group->codec->layers()) ++counts_.read_pages;
  return {};
}

PageCheck Disk::check(Job& job, std::byte* image) {
  const PageCodec& codec = *job.group->codec;
  const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
  if (job.layers == nullptr || job.layers->lo == 0) {
    PageCheck trailer = codec.check_trailer(image, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
                                            PageTag::read(job.task.move.tag), unix_now());
    if (trailer.miss != PageMiss::kNone) return trailer;
  }
  if (job.layers == nullptr) return codec.check_runs(image);
  const LayerReads& layers = *job.layers;
  for (const size_t run : layers.runs) {
    const PageRun& at = codec.runs()[run];
    size_t span = 0;
    while (at.offset >= layers.spans[span].offset + layers.spans[span].bytes) ++span;
    std::byte* bytes = job.span_at[span] + (at.offset - layers.spans[span].offset);
    PageCheck found = codec.check_run(image, run, bytes);
    if (found.miss != PageMiss::kNone) return found;
    if (job.bounce) std::memcpy(image + at.offset, bytes, static_cast<size_t>(at.bytes));
  }
  return {};
}

}  // namespace flexkv
