// A disk's work for one page. It begins the page's I/Os, and decides from their results whether the page
// succeeded and whether the disk is full or must be taken out of service.
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "base/unix_clock.h"
#include "storage/disk.h"
#include "storage/striping.h"

namespace flexkv {
namespace {

// Unit: pages. After this many consecutive reads (or writes) of pages have failed with an I/O error, the disk
// is taken out of service. A bad sector makes a single page fail; a bad disk makes all pages fail.
constexpr int32_t kReadErrorsBeforeOut = 8;
constexpr int32_t kWriteErrorsBeforeOut = 3;

// After a disk was full, the disk lane waits for this long before it again tries a write that needs new
// space. During this pause, the disk's pages can be read, and slots with allocated space can be written.
constexpr std::chrono::seconds kFullPause{2};

// Whether this errno means that no slot of the disk can be used any more.
bool is_final(int32_t error) {
  return error == EROFS || error == ENODEV || error == ENXIO || error == EBADF || error == EFBIG;
}

const LayerReads& layers_of(const DiskGroup& group, const WorkItem& item) {
  const auto found = std::find_if(group.layer_reads.begin(), group.layer_reads.end(),
                                  [&](const LayerReads& reads) { return reads.lo == item.layer_lo(); });
  if (found == group.layer_reads.end() || found->hi != item.layer_hi()) {
    throw ContractError("layers [" + std::to_string(item.layer_lo()) + ", " +
                        std::to_string(item.layer_hi()) + ") are no range that a disk reads");
  }
  return *found;
}

}  // namespace

void Disk::add_io(size_t job, bool write, std::byte* buffer, int64_t bytes, int64_t image_offset) {
  const SlabFile& slab = *slabs_[static_cast<size_t>(jobs_[job].task.move.group)];
  // No unaligned I/O may reach the kernel. ext4 would accept it, but perform it slowly through the page
  // cache.
  if (reinterpret_cast<uintptr_t>(buffer) % kIoAlignBytes != 0 || bytes % kIoAlignBytes != 0 ||
      image_offset % kIoAlignBytes != 0) {
    throw ContractError("an I/O that is not on 4 KiB boundaries");
  }
  const int64_t offset = slab.offset(jobs_[job].task.slot) + image_offset;
  if (free_ios_.empty()) {  // the number of I/Os varies, because a layerwise read makes several I/Os per rank
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

// Begins the job of a page: seals the page if it will be written, and prepares the I/Os. Throws if there is
// not enough memory, or if the op's layers are invalid.
void Disk::begin(const PageTask& task) {
  const size_t at = free_jobs_.back();
  Job& job = jobs_[at];
  job = Job{};
  job.group = &(*groups_)[static_cast<size_t>(task.move.group)];
  job.write = task.move.kind != OpKind::kDiskRead;
  job.task = task;
  job.shows_room = job.write && full_ && (full_with_space_ || !has_space(task));
  const PageCodec& codec = *job.group->codec;
  std::byte* image = job.task.move.slot < 0 ? nullptr : job.group->pool->slot_address(job.task.move.slot);
  if (task.move.kind == OpKind::kDiskSeal) {
    begin_seal(at);
  } else if (job.write) {
    const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
    codec.seal(image, {slab.shape().id, static_cast<uint64_t>(job.task.slot)},
               PageTag::read(job.task.move.tag), unix_now());
    add_io(at, true, image, codec.image_bytes(), 0);
  } else if (job.task.item->layer_lo() == 0 && job.task.item->layer_hi() == codec.layers()) {
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

// Begins the job of a DISK_SEAL op, which writes only the trailer: other lanes have written the stripes, and
// the op contains the digests of their runs.
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

// Begins the read of a range of layers. The read of the first range also reads the trailer into the host
// slot, where it stays for the verification of later ranges.
void Disk::begin_layers(size_t at) {
  Job& job = jobs_[at];
  const PageCodec& codec = *job.group->codec;
  const LayerReads& layers = layers_of(*job.group, *job.task.item);
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

// Whether the file system has already allocated space for all bytes of the page's image.
bool Disk::has_space(const PageTask& task) const {
  const auto group = static_cast<size_t>(task.move.group);
  const int64_t at = slabs_[group]->offset(task.slot);
  return slabs_[group]->next_unwritten(at).first >= at + (*groups_)[group].codec->image_bytes();
}

// Whether a write failed because the disk is full. If a file system runs out of space in the middle of a
// write, it reports a short write and no error, so this function checks how much space is left.
bool Disk::is_full(const Job& job) const {
  if (job.error != 0) return job.error == ENOSPC || job.error == EDQUOT;
  struct statvfs space{};
  const SlabFile& slab = *slabs_[static_cast<size_t>(job.task.move.group)];
  return fstatvfs(slab.fd(), &space) == 0 &&
         static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize) <
             slab.shape().slot_bytes;
}

void Disk::set_full(const std::string& reason) {
  full_ = !reason.empty();
  full_with_space_ = full_ && full_with_space_;
  full_until_ = full_ ? Clock::now() + kFullPause : Clock::time_point{};
  const std::lock_guard lock(mutex_);
  full_reason_ = reason;
}

MoveResult Disk::write_failed(const PageTask& task, const std::string& why) {
  ++counts_.write_errors;
  return {Status::kFailed,
          "disk write to " + slot_name(number_, task.slot) + ": " + why,
          {},
          FailureCause::kSource};
}

// Counts an I/O error, and sets `pending_out_` if the disk must be taken out of service.
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
          std::string("disk miss (") + kMissNames[static_cast<size_t>(check.miss)] + ") on " +
              slot_name(number_, job.task.slot) + ": " + check.reason,
          {},
          failure_cause_of(check.miss)};
}

MoveResult Disk::end(Job& job) {
  if (!job.write) return end_read(job);
  if (job.error == 0 && job.missing == 0) {
    write_errors_in_row_ = 0;
    if (job.shows_room) set_full("");
    if (lost()) return lost_result();
    ++counts_.written_pages;
    counts_.written_bytes += job.bytes;
    if (zero_fill_) zero_fill_->wrote(static_cast<size_t>(job.task.move.group), job.task.slot);
    return {};
  }
  if (is_full(job)) {
    const std::string what = std::strerror(job.error != 0 ? job.error : ENOSPC);
    full_with_space_ = full_with_space_ || has_space(job.task);
    set_full(what);
    return write_failed(job.task, what);
  }
  disk_error(true, job.error);
  return write_failed(job.task, job.error != 0 ? std::strerror(job.error)
                                               : std::to_string(job.missing) + " bytes were not written");
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
  if (job.task.item->layer_hi() == job.group->codec->layers()) ++counts_.read_pages;
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
