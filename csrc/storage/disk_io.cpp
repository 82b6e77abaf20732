// A disk's I/O thread.
#include <cerrno>
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
// Unit: bytes. Under way on one disk: 16 pages of 2 MiB keep an NVMe drive at its full speed (the same as 32
// on the drive measured), and a read that comes then waits about 10 ms at 3 GB/s.
constexpr int64_t kMostBytesUnderWay = int64_t{32} << 20;
// Unit: I/Os that failed in a row. A bad sector fails alone; a bad disk fails all.
constexpr int32_t kReadErrorsBeforeOut = 8;
constexpr int32_t kWriteErrorsBeforeOut = 3;

// Errors that no other slot of the file system would be spared.
bool is_final(int32_t error) {
  return error == ENOSPC || error == EDQUOT || error == EROFS || error == ENODEV || error == ENXIO ||
         error == EBADF || error == EFBIG;
}

uint64_t unix_now() { return static_cast<uint64_t>(std::time(nullptr)); }

}  // namespace

void Disk::run(const std::shared_ptr<WorkSource>& source) {
  std::unique_ptr<IoQueue> queue;  // out here, so that nobody wakes one that is gone
  try {
    queue = make_io_queue(options_.io, options_.depth);
    {
      const std::lock_guard lock(mutex_);
      backend_ = queue->name();
    }
    if (wrap_) queue = wrap_(std::move(queue), number_);
    work(*queue, *source);
    const std::lock_guard lock(mutex_);
    queue_ = nullptr;
  } catch (const std::exception& error) {
    // What is under way may still move and is never heard of again: its slots stay leased for good.
    {
      const std::lock_guard lock(mutex_);
      queue_ = nullptr;
    }
    take_out(error.what(), source.get());
  }
}

void Disk::work(IoQueue& queue, WorkSource& source) {
  std::vector<IoDone> done;
  std::vector<Ended> ended;
  for (;;) {
    uint64_t pushes = 0;
    {
      const std::lock_guard lock(mutex_);
      pushes = pushes_;
    }
    ended.clear();
    begin_picked(ended);
    report(ended, source);
    submit_ios(queue);
    uint64_t oldest = 0;
    for (const Job& job : jobs_) {
      if (job.sequence != 0 && (oldest == 0 || job.sequence < oldest)) oldest = job.sequence;
    }
    oldest_.store(oldest, std::memory_order_relaxed);
    {
      std::unique_lock lock(mutex_);
      if (running_jobs_ == 0) {
        queue_ = nullptr;
        work_.wait(lock, [this] { return stopping_ || !reads_.empty() || !writes_.empty(); });
        if (reads_.empty() && writes_.empty()) return;
        continue;
      }
      if (pushes != pushes_) continue;  // it would not be woken for them
      queue_ = &queue;
    }
    done.clear();
    queue.wait(done);
    ended.clear();
    for (const IoDone& one : done) io_done(one, ended);
    report(ended, source);
    if (!pending_out_.empty()) take_out(std::exchange(pending_out_, {}), &source);
  }
}

void Disk::begin_picked(std::vector<Ended>& ended) {
  PageTask task;
  bool picked = false;
  while (pick(task)) {
    picked = true;
    try {
      begin(task);
    } catch (const std::exception& error) {
      add(ended, task, {Status::kFailed, error.what()});
    }
  }
  if (picked) on_room_();
}

// The next task that may begin now.
bool Disk::pick(PageTask& task) {
  if (running_jobs_ == options_.depth) return false;
  const std::lock_guard lock(mutex_);
  const bool write_waits = !writes_.empty() && running_writes_ < (options_.depth + 1) / 2;
  const bool write_first = write_waits && (reads_.empty() || reads_in_row_ >= kReadsBeforeWrite);
  if (!write_first && reads_.empty()) return false;
  std::deque<PageTask>& from = write_first ? writes_ : reads_;
  const DiskGroup& group = (*groups_)[static_cast<size_t>(from.front().move.group)];
  if (running_jobs_ > 0 && running_bytes_ + group.codec->image_bytes() > kMostBytesUnderWay) return false;
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
  size_t at = 0;
  while (jobs_[at].sequence != 0) ++at;
  Job& job = jobs_[at];
  job = Job{};
  job.group = &(*groups_)[static_cast<size_t>(task.move.group)];
  job.write = task.move.kind == OpKind::kDiskWrite;
  job.task = task;
  const PageCodec& codec = *job.group->codec;
  std::byte* image = job.group->pool->slot_address(job.task.move.slot);
  if (job.write) {
    const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
    codec.seal(image, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
               PageTag::read(job.task.move.tag), unix_now());
    add_io(at, true, image, codec.image_bytes(), 0);
  } else if (job.task.piece->layer_lo() == 0 && job.task.piece->layer_hi() == codec.layers()) {
    add_io(at, false, image, codec.image_bytes(), 0);
  } else {
    begin_layer(at);
  }
  job.sequence = next_sequence_++;
  ++running_jobs_;
  running_writes_ += job.write ? 1 : 0;
  running_bytes_ += job.bytes;
}

// A layer, and with the first one the trailer, which the later ones then find in the slot.
void Disk::begin_layer(size_t at) {
  Job& job = jobs_[at];
  const PageCodec& codec = *job.group->codec;
  const int32_t number = job.task.piece->layer_lo();
  const LayerReads& layer = job.group->layer_reads[static_cast<size_t>(number)];
  std::byte* image = job.group->pool->slot_address(job.task.move.slot);
  int64_t total = 0;
  for (const ImageSpan& span : layer.spans) total += span.bytes;
  std::byte* bounce = nullptr;
  if (!layer.alone) {
    bounce = static_cast<std::byte*>(
        std::aligned_alloc(static_cast<size_t>(kIoAlignBytes), static_cast<size_t>(total)));
    if (bounce == nullptr) throw CapacityError("no memory to read a layer");
    job.bounce = {bounce, std::free};
  }
  if (number == 0) {
    const int64_t trailer = codec.image().trailer_offset();
    add_io(at, false, image + trailer, codec.image_bytes() - trailer, trailer);
  }
  for (const ImageSpan& span : layer.spans) {
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

void Disk::io_done(const IoDone& done, std::vector<Ended>& ended) {
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
  MoveResult result;
  try {
    result = end(job);
  } catch (const std::exception& error) {
    result = {Status::kFailed, error.what()};
  }
  add(ended, job.task, std::move(result));
  job = Job{};
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
  return {Status::kFailed, std::string("disk miss (") + kMissNames[static_cast<size_t>(check.miss)] +
                               ") at place " + std::to_string(job.task.move.place) + ": " + check.reason};
}

MoveResult Disk::end(Job& job) {
  if (!job.write) return end_read(job);
  if (job.error == 0 && job.missing == 0) {
    write_errors_in_row_ = 0;
    if (lost()) return lost_result();
    ++counts_.written_pages;
    counts_.written_bytes += job.bytes;
    return {};
  }
  ++counts_.write_errors;
  disk_error(true, job.error);
  const std::string what =
      job.error != 0 ? std::strerror(job.error) : std::to_string(job.missing) + " bytes were not written";
  return {Status::kFailed, "disk write at place " + std::to_string(job.task.move.place) + ": " + what};
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
  const int32_t number = job.task.piece->layer_lo();
  if (number == 0) {
    PageCheck trailer = codec.check_trailer(image, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
                                            PageTag::read(job.task.move.tag), unix_now());
    if (trailer.miss != PageMiss::kNone) return trailer;
  }
  if (job.span_at.empty()) return codec.check_runs(image);
  const LayerReads& layer = job.group->layer_reads[static_cast<size_t>(number)];
  for (const size_t run : layer.runs) {
    const PageRun& at = codec.runs()[run];
    size_t span = 0;
    while (at.offset >= layer.spans[span].offset + layer.spans[span].bytes) ++span;
    std::byte* bytes = job.span_at[span] + (at.offset - layer.spans[span].offset);
    PageCheck found = codec.check_run(image, run, bytes);
    if (found.miss != PageMiss::kNone) return found;
    if (job.bounce) std::memcpy(image + at.offset, bytes, static_cast<size_t>(at.bytes));
  }
  return {};
}

}  // namespace flexkv
