// The functions of Disk that other threads call: they queue pages, read the disk's state, and take the disk
// out of service. The I/O thread is in disk_io.cpp, and its work for one page in disk_job.cpp.
#include "storage/disk.h"

#include <algorithm>
#include <utility>

namespace flexkv {

namespace {

// The number of pages that may be queued on a disk per page that may be in flight. The number is small, so
// that a new load does not wait behind many pages.
constexpr size_t kQueuedPerDepth = 2;
// Unit: bytes. More pages than kQueuedPerDepth allows may be queued if they are small: up to this total size
// (5 ms at 3 GB/s). This keeps the disk busy until the dispatcher runs again.
constexpr int64_t kQueuedBytes = int64_t{16} << 20;

size_t queue_pages(const std::vector<DiskGroup>& groups, int32_t depth) {
  int64_t image = kQueuedBytes;
  for (const DiskGroup& group : groups) image = std::min(image, group.codec->image_bytes());
  return std::max(kQueuedPerDepth * static_cast<size_t>(depth), static_cast<size_t>(kQueuedBytes / image));
}

}  // namespace

Disk::Disk(int32_t number, std::vector<std::shared_ptr<SlabFile>> slabs,
           std::shared_ptr<const std::vector<DiskGroup>> groups, const DiskOptions& options, WrapQueue wrap,
           std::function<void()> on_change)
    : number_(number),
      slabs_(std::move(slabs)),
      groups_(std::move(groups)),
      options_(options),
      wrap_(std::move(wrap)),
      on_change_(std::move(on_change)),
      room_below_(queue_pages(*groups_, options.depth)),
      jobs_(2 * static_cast<size_t>(options.depth)) {
  for (size_t job = jobs_.size(); job > 0; --job) free_jobs_.push_back(job - 1);
}

void Disk::add(std::vector<Ended>& ended, const PageTask& task, MoveResult result) {
  if (ended.empty() || ended.back().item != task.item) ended.push_back({task.item, {}, {}});
  ended.back().indices.push_back(task.index);
  ended.back().results.push_back(std::move(result));
}

void Disk::report(const std::vector<Ended>& ended, WorkSource& source) {
  for (const Ended& one : ended) source.finish_pages(one.item, one.indices, one.results);
}

MoveResult Disk::lost_result() const {
  return {Status::kLaneDown, "disk " + std::to_string(number_) + " was taken out: " + lost_reason_};
}

void Disk::push(std::vector<PageTask> tasks, WorkSource& source) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    ++pushes_;
    for (PageTask& task : tasks) {
      if (lost_) {
        ++counts_.misses[static_cast<size_t>(PageMiss::kDiskLost)];
        add(ended, task, lost_result());
      } else {
        (task.move.kind == OpKind::kDiskRead ? reads_ : writes_).push_back(std::move(task));
      }
    }
    if (queue_ != nullptr) queue_->wake();
  }
  work_.notify_one();
  report(ended, source);
}

size_t Disk::queued() const {
  const std::lock_guard lock(mutex_);
  return reads_.size() + writes_.size();
}

bool Disk::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

std::string Disk::lost_reason() const {
  const std::lock_guard lock(mutex_);
  return lost_reason_;
}

std::string Disk::full_reason() const {
  const std::lock_guard lock(mutex_);
  return full_reason_;
}

std::string Disk::backend() const {
  const std::lock_guard lock(mutex_);
  return backend_;
}

std::string Disk::backend_note() const {
  const std::lock_guard lock(mutex_);
  return backend_note_;
}

void Disk::take_out(const std::string& reason, WorkSource* source) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    if (lost_) return;
    lost_ = true;
    lost_reason_ = reason;
    for (std::deque<PageTask>* queue : {&reads_, &writes_}) {
      for (const PageTask& task : *queue) {
        ++counts_.misses[static_cast<size_t>(PageMiss::kDiskLost)];
        add(ended, task, lost_result());
      }
      queue->clear();
    }
  }
  if (source != nullptr) report(ended, *source);
  on_change_();
}

bool Disk::look(int32_t looks) {
  const uint64_t oldest = oldest_.load(std::memory_order_relaxed);
  quiet_looks_ = oldest != 0 && oldest == seen_oldest_ ? quiet_looks_ + 1 : 0;
  seen_oldest_ = oldest;
  return quiet_looks_ >= looks;
}

bool Disk::will_end(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return zero_filled_.wait_until(lock, until, [this] { return !zero_filling_; });
}

void Disk::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (queue_ != nullptr) queue_->wake();
  }
  work_.notify_all();
}

}  // namespace flexkv
