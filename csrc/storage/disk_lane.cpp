#include "storage/disk_lane.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "storage/striping.h"
#include "transfer/deadline.h"

namespace flexkv {
namespace {

// Unit: pages. The maximum number of pages in the queues of all disks together. This many queued pages take a
// few MiB of memory. The limit matters while a disk hangs and the watchdog has not noticed it yet.
constexpr size_t kMostQueuedPages = 65536;
// Unit: checks. A disk counts as hung if its oldest job stays the same for this many checks. Checks are
// counted instead of seconds, so that no disk counts as hung when a process resumes that was stopped for a
// while. The transfer engine's watchdog has a constant with the same name and purpose.
constexpr int32_t kLooksUntilStuck = 4;
// Unit: seconds. join() waits for a write of zeros for at most `stuck_s` seconds, or for this time if
// `stuck_s` is smaller.
constexpr double kLeastStuckS = 1.0;

// Returns the slot size of a group's slabs: the size of the largest image of the groups that share these
// slabs.
int64_t slab_slot_bytes(const std::vector<DiskGroup>& groups,
                        const std::vector<std::vector<std::shared_ptr<SlabFile>>>& slabs, size_t group) {
  int64_t bytes = groups[group].codec->image_bytes();
  for (const auto& of_disk : slabs) {
    for (size_t g = 0; g < of_disk.size(); ++g) {
      if (of_disk[g] == of_disk[group]) bytes = std::max(bytes, groups[g].codec->image_bytes());
    }
  }
  return bytes;
}

}  // namespace

struct DiskLane::Shared {
  std::shared_ptr<const std::vector<DiskGroup>> groups;
  DiskOptions options;
  std::vector<std::shared_ptr<Disk>> disks;
  std::vector<int64_t> places;  // for each group, its number of places
  std::mutex mutex;             // guards the members that follow, except for the atomic one
  std::condition_variable changed;
  std::shared_ptr<WorkSource> source;  // set by start()
  uint64_t room_seen = 0;
  bool stopping = false;
  bool files_closed = false;
  std::atomic<bool> waits_for_room{false};

  // A disk calls this function after it has begun pages, or after it was lost. The dispatcher first sets the
  // flag `waits_for_room` and then calls has_room(). The disk first changes its state, and then this function
  // reads the flag. So either the dispatcher sees the disk's new state, or this function sees the flag.
  void on_change() {
    if (!waits_for_room || !has_room()) return;
    {
      const std::lock_guard lock(mutex);
      ++room_seen;
    }
    changed.notify_all();
  }
  // Whether the dispatcher may take more work. It may if some working disk has room in its queue. It also may
  // if all disks are lost, because pages then fail at once.
  bool has_room() const {
    size_t total = 0;
    bool some = false;
    bool alive = false;
    for (const auto& disk : disks) {
      const size_t queued = disk->queued();
      total += queued;
      alive |= !disk->lost();
      some |= !disk->lost() && queued < disk->room_below();
    }
    return (some || !alive) && total < kMostQueuedPages;
  }
  void wait_room() {
    std::unique_lock lock(mutex);
    for (;;) {
      const uint64_t seen = room_seen;
      waits_for_room = true;
      lock.unlock();
      if (has_room()) {
        waits_for_room = false;
        return;
      }
      lock.lock();
      changed.wait(lock, [&] { return room_seen != seen; });
    }
  }
};

DiskLane::DiskLane(std::vector<DiskGroup> groups, std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs,
                   const DiskOptions& options, WrapQueue wrap)
    : shared_(std::make_shared<Shared>()) {
  if (groups.empty() || slabs.empty()) throw ContractError("a disk lane needs a group and a disk");
  if (options.depth < 1 || options.depth > 1024) {
    throw ConfigError("depth=" + std::to_string(options.depth) + ": must be in [1, 1024]");
  }
  if (options.io == IoBackend::kUring) {
    if (const std::string refusal = uring_refusal(); !refusal.empty()) throw DiskError(refusal);
  }
  for (const auto& of_disk : slabs) {
    if (!of_disk.empty() && of_disk.size() != groups.size()) {
      throw ContractError("a disk lane needs a slab for each group");
    }
  }
  shared_->places.resize(groups.size(), INT32_MAX);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].layer_reads = plan_layer_reads(*groups[g].codec);
    const int64_t image = slab_slot_bytes(groups, slabs, g);
    const int64_t slot = groups[g].pool->geometry().slot_bytes;
    if (slot != image) {
      throw GeometryError("group " + std::to_string(g) + ": host slots of " + std::to_string(slot) +
                          " bytes for slot images of " + std::to_string(image));
    }
    for (const auto& of_disk : slabs) {
      if (of_disk.empty()) continue;
      const SlabShape& shape = of_disk[g]->shape();
      if (shape.slot_bytes != image) {
        throw GeometryError(of_disk[g]->path() + ": slots of " + std::to_string(shape.slot_bytes) +
                            " bytes for slot images of " + std::to_string(image));
      }
      const int64_t places = shape.slots * static_cast<int64_t>(slabs.size());
      shared_->places[g] = std::min(shared_->places[g], places);
    }
  }
  shared_->groups = std::make_shared<const std::vector<DiskGroup>>(std::move(groups));
  shared_->options = options;
  for (size_t d = 0; d < slabs.size(); ++d) {
    const bool usable = !slabs[d].empty();
    const std::weak_ptr<Shared> weak = shared_;
    shared_->disks.push_back(std::make_shared<Disk>(static_cast<int32_t>(d), std::move(slabs[d]),
                                                    shared_->groups, options, wrap, [weak] {
                                                      if (const auto shared = weak.lock())
                                                        shared->on_change();
                                                    }));
    if (!usable) shared_->disks.back()->take_out("it could not be opened", nullptr);
  }
}

int32_t DiskLane::concurrency() const { return disks() * shared_->options.depth; }

int32_t DiskLane::disks() const { return static_cast<int32_t>(shared_->disks.size()); }

PageSizes DiskLane::check(const OpSpec& op) const {
  const std::string name = "op " + std::to_string(op.op_id);
  if (op.group < 0 || static_cast<size_t>(op.group) >= shared_->groups->size()) {
    throw ContractError(name + ": group " + std::to_string(op.group) + ": the disks have groups [0, " +
                        std::to_string(shared_->groups->size()) + ")");
  }
  const DiskGroup& group = (*shared_->groups)[static_cast<size_t>(op.group)];
  if (op.layerwise && op.kind != OpKind::kDiskRead) {
    throw ContractError(name + ": a " + to_string(op.kind) + " is never layerwise: pages are written whole");
  }
  if (group.pool->closed()) throw ClosedError(name + ": the host pool of its group was closed");
  if (op.kind == OpKind::kDiskSeal && shared_->options.zero_fill) {
    throw ContractError(name +
                        ": a DISK_SEAL means that others write stripes, which zeros written ahead would hit");
  }
  const size_t digests = op.kind == OpKind::kDiskSeal ? op.pages() * group.codec->num_runs() : 0;
  if (op.digests.size() != digests) {
    throw ContractError(name + ": " + std::to_string(op.digests.size()) + " run digests for " +
                        std::to_string(op.pages()) + " pages of " + std::to_string(group.codec->num_runs()) +
                        " runs");
  }
  const auto require = [&](const std::vector<int32_t>& ids, int64_t end, const char* what) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < end) continue;
      throw BlockRangeError(std::string(what) + " " + std::to_string(ids[i]) + " at page " +
                            std::to_string(i) + " of " + name + ": allowed are [0, " + std::to_string(end) +
                            ")");
    }
  };
  require(op.slots, group.pool->ready_slots(), "slot");
  require(op.places, shared_->places[static_cast<size_t>(op.group)], "place");
  PageSizes sizes{group.codec->image_bytes(), group.codec->layers()};
  for (const LayerReads& stage : group.layer_reads) sizes.stages.push_back(stage.lo);
  return sizes;
}

void DiskLane::dispatch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source,
                        int32_t lane) {
  const auto disks = static_cast<int32_t>(shared->disks.size());
  for (;;) {
    shared->wait_room();
    const std::shared_ptr<WorkItem> item = source->take(lane);
    if (!item) break;
    std::vector<std::vector<PageTask>> tasks(shared->disks.size());
    for (size_t i = 0; i < item->positions().size(); ++i) {
      const PageMove move = item->page(i);
      const StripedSlot at = striped_slot(move.place, disks);
      tasks[static_cast<size_t>(at.disk)].push_back({item, i, move, at.slot});
    }
    for (size_t d = 0; d < tasks.size(); ++d) {
      if (!tasks[d].empty()) shared->disks[d]->push(std::move(tasks[d]), *source);
    }
  }
  for (const auto& disk : shared->disks) disk->stop();
  {
    const std::lock_guard lock(shared->mutex);
    shared->stopping = true;
  }
  shared->changed.notify_all();
}

void DiskLane::watch(const std::shared_ptr<Shared>& shared, const std::shared_ptr<WorkSource>& source) {
  const auto step = to_duration(shared->options.stuck_s / kLooksUntilStuck);
  std::unique_lock lock(shared->mutex);
  while (!shared->stopping) {
    shared->changed.wait_for(lock, step, [&] { return shared->stopping; });
    lock.unlock();
    for (const auto& disk : shared->disks) {
      if (!disk->look(kLooksUntilStuck)) continue;
      disk->take_out("an I/O has not ended for " + std::to_string(shared->options.stuck_s) + " s",
                     source.get());
    }
    lock.lock();
  }
}

void DiskLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->source = source;
  }
  std::vector<std::pair<const char*, std::function<void()>>> bodies;
  for (const auto& disk : shared_->disks) {
    bodies.emplace_back("flexkv-disk", [disk, source] { disk->run(source); });
  }
  if (shared_->options.stuck_s > 0) {
    bodies.emplace_back("flexkv-dwatch", [shared = shared_, source] { watch(shared, source); });
  }
  bodies.emplace_back("flexkv-dtake", [shared = shared_, source, lane] { dispatch(shared, source, lane); });
  // If an earlier call failed because a thread could not be started, this call starts only the missing
  // threads.
  while (threads_.size() < bodies.size()) {
    auto& [name, body] = bodies[threads_.size()];
    threads_.emplace_back(std::move(body));
    pthread_setname_np(threads_.back().native_handle(), name);
  }
}

// Records in the host slot that the read has finished, because loads in this and other processes may wait for
// the page.
void DiskLane::read_ended(const OpSpec& op, int32_t page, bool verified) {
  const HostPool& pool = *(*shared_->groups)[static_cast<size_t>(op.group)].pool;
  pool.slot_arrivals().settle(op.slots[static_cast<size_t>(page)], op.op_id, verified);
}

void DiskLane::read_advanced(const OpSpec& op, int32_t page, int32_t layers) {
  const HostPool& pool = *(*shared_->groups)[static_cast<size_t>(op.group)].pool;
  pool.slot_arrivals().advance(op.slots[static_cast<size_t>(page)], op.op_id, layers);
}

void DiskLane::join() {
  const size_t disks = std::min(threads_.size(), shared_->disks.size());
  // Joins the dispatcher's thread first, because that thread stops the disks' threads.
  for (size_t i = threads_.size(); i > disks; --i) threads_[i - 1].join();
  // All disks have the same deadline, so that the waits for several hung disks do not add up.
  const auto until = deadline_in(std::max(shared_->options.stuck_s, kLeastStuckS));
  bool all_ended = true;
  for (size_t d = 0; d < disks; ++d) {
    if (shared_->disks[d]->will_end(until)) {
      threads_[d].join();
    } else {
      threads_[d].detach();  // the thread keeps its slab files open, and so the lock on their folder
      all_ended = false;
    }
  }
  threads_.clear();
  for (const auto& disk : shared_->disks) disk->close_files();
  const std::lock_guard lock(shared_->mutex);
  shared_->source.reset();
  shared_->files_closed = all_ended;
}

bool DiskLane::zero_fill() const { return shared_->options.zero_fill; }

bool DiskLane::files_closed() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->files_closed;
}

void DiskLane::abandon() {
  for (std::thread& thread : threads_) thread.detach();
  threads_.clear();
  const std::lock_guard lock(shared_->mutex);
  shared_->source.reset();
}

Disk& DiskLane::disk_at(int32_t disk) const {
  if (disk >= 0 && disk < disks()) return *shared_->disks[static_cast<size_t>(disk)];
  throw BlockRangeError("disk " + std::to_string(disk) + ": the lane has disks [0, " +
                        std::to_string(disks()) + ")");
}

void DiskLane::take_out(int32_t disk, const std::string& reason) {
  std::shared_ptr<WorkSource> source;
  {
    const std::lock_guard lock(shared_->mutex);
    source = shared_->source;
  }
  disk_at(disk).take_out(reason, source.get());
}

std::vector<std::string> DiskLane::full_reasons() const {
  std::vector<std::string> reasons;
  for (const auto& disk : shared_->disks) reasons.push_back(disk->full_reason());
  return reasons;
}

std::vector<DiskState> DiskLane::states() const {
  std::vector<DiskState> states;
  for (const auto& disk : shared_->disks) {
    states.push_back({disk->lost(), disk->lost_reason(), disk->backend(), disk->backend_note()});
  }
  return states;
}

const DiskCounts& DiskLane::counts(int32_t disk) const { return disk_at(disk).counts(); }

}  // namespace flexkv
