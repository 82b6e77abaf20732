#include "gds/gds_lane.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/nvtx.h"
#include "cuda/event.h"
#include "gds/slab_gate.h"
#include "storage/layer_reads.h"
#include "storage/striping.h"
#include "transfer/sub_batch.h"

namespace flexkv {
namespace {

// Unit: bytes. When a transfer has this many bytes, the lane adds no further work item to it. 16 pages of 2
// MiB keep an NVMe disk at its full speed; the disk lane has the same limit. At 3 GB/s, a store transfer of
// this size takes about 10 ms, for which a new load may have to wait.
constexpr int64_t kMostTransferBytes = int64_t{32} << 20;

LayerRange layers_of(const WorkItem& item) { return {item.layer_lo(), item.layer_hi()}; }

// The page with number `index` of the work item with number `item`.
struct Task {
  size_t item = 0;
  size_t index = 0;
  PageMove move;
};

// Returns where the stripe of `view` lies in a slot image. Throws GeometryError if the image's runs in that
// stripe differ from the view's runs.
StripePlace place_of(const PageCodec& codec, int32_t stripe, const KvView& view) {
  const SlotImage& image = codec.image();
  const size_t first = static_cast<size_t>(codec.digest_offset(stripe) - codec.digest_offset(0)) / 8;
  bool same =
      view.stripe_bytes() == image.stripe_bytes(stripe) && first + view.runs().size() <= codec.num_runs();
  for (size_t i = 0; same && i < view.runs().size(); ++i) {
    const PageRun& run = codec.runs()[first + i];
    const Segment& mine = view.runs()[i];
    same = run.offset == image.stripe_offset(stripe) + mine.page_offset && run.bytes == mine.run_bytes &&
           run.layer == mine.layer;
  }
  if (!same) {
    throw GeometryError("a view of " + std::to_string(view.runs().size()) + " runs, " +
                        std::to_string(view.stripe_bytes()) + " bytes: the slabs have other runs in stripe " +
                        std::to_string(stripe));
  }
  return {image.stripe_offset(stripe), image.trailer_offset(), codec.digest_offset(stripe),
          image.total_bytes()};
}

PageMiss miss_of(StagedFailure cause, PageMiss at_gate) {
  switch (cause) {
    case StagedFailure::kIo:
      return PageMiss::kIo;
    case StagedFailure::kShort:
      return PageMiss::kShort;
    case StagedFailure::kDigest:
      return PageMiss::kData;
    case StagedFailure::kGate:
      return at_gate;
    default:
      return PageMiss::kNone;
  }
}

FailureCause failure_cause_of(StagedFailure cause, PageMiss miss) {
  if (cause == StagedFailure::kStopped) return FailureCause::kNotExecuted;
  return failure_cause_of(miss);  // returns kTransport if there is no miss
}

// A layerwise read brings a rank's stripe in several ranges of layers. Returns the first layer of each range.
// The ranges are the same as in the disk lane. But if the runs of some range are not contiguous in the
// stripe, there is one range of all layers.
std::vector<int32_t> read_stages(const PageCodec& codec, int32_t stripe) {
  const std::vector<int32_t> starts = layer_stages(codec);
  const int64_t begin = codec.image().stripe_offset(stripe);
  const int64_t end = begin + codec.image().stripe_bytes(stripe);
  size_t last = 0;
  for (const PageRun& run : codec.runs()) {
    if (run.offset < begin || run.offset >= end) continue;
    const auto next = std::upper_bound(starts.begin(), starts.end(), run.layer);
    const auto stage = static_cast<size_t>(next - starts.begin()) - 1;
    if (stage < last) return {0};
    last = stage;
  }
  return starts;
}

// Returns the slot size that a slab must have: the size of the largest slot image among the groups that share
// the slab.
int64_t slab_slot_bytes(const std::vector<GdsGroup>& groups, size_t disk, uint64_t slab_id) {
  int64_t bytes = 0;
  for (const GdsGroup& group : groups) {
    if (group.slabs[disk].shape.id == slab_id) bytes = std::max(bytes, group.codec->image_bytes());
  }
  return bytes;
}

}  // namespace

struct GdsLane::Shared {
  std::vector<GdsGroup> groups;
  std::vector<std::vector<int32_t>> stages;  // read_stages() of each group
  int32_t stripe = 0;
  std::shared_ptr<GDSManager> manager;
  DiskCounts counts;

  int32_t disks() const { return static_cast<int32_t>(groups.front().slabs.size()); }
  void run(WorkSource& source, int32_t lane);
  std::vector<std::shared_ptr<WorkItem>> take(WorkSource& source, int32_t lane) const;
  void move(const std::vector<std::shared_ptr<WorkItem>>& items,
            std::vector<std::vector<MoveResult>>& results, const std::function<void(size_t)>& finish_before);
  void move_group(const std::vector<std::shared_ptr<WorkItem>>& items, const std::vector<Task>& tasks,
                  std::vector<std::vector<MoveResult>>& results);
  MoveResult failed(const PageMove& page, const PageFailure& failure, PageMiss at_gate);
};

// Waits for a work item and takes it. Then takes further queued items of the same op kind, until all items
// together have kMostTransferBytes. Returns no items when the lane has to end.
std::vector<std::shared_ptr<WorkItem>> GdsLane::Shared::take(WorkSource& source, int32_t lane) const {
  std::vector<std::shared_ptr<WorkItem>> items;
  std::shared_ptr<WorkItem> item = source.take(lane);
  for (int64_t bytes = 0; item != nullptr;) {
    items.push_back(item);
    const PageMove page = item->page(0);
    const bool whole = item->stages() == 1;
    const int64_t page_bytes = whole ? groups[static_cast<size_t>(page.group)].codec->image_bytes()
                                     : page.view->layer_bytes(item->layer_lo(), item->layer_hi());
    bytes += static_cast<int64_t>(item->positions().size()) * page_bytes;
    if (bytes >= kMostTransferBytes) break;
    item = source.try_take(lane, kind_bit(item->kind()));
  }
  return items;
}

void GdsLane::Shared::run(WorkSource& source, int32_t lane) {
  for (;;) {
    const auto items = take(source, lane);
    if (items.empty()) return;
    std::vector<std::vector<MoveResult>> results;
    for (const auto& item : items) {
      results.emplace_back(item->positions().size(),
                           MoveResult{Status::kFailed, "was not moved", {}, FailureCause::kTransport});
    }
    size_t finished = 0;
    const auto finish_before = [&](size_t end) {
      for (; finished < end; ++finished) source.finish(items[finished], results[finished]);
    };
    try {
      move(items, results, finish_before);
    } catch (const std::exception& error) {
      for (auto& of_piece : results) {
        for (MoveResult& result : of_piece) {
          if (result.status != Status::kOk) result.reason = error.what();
        }
      }
    }
    finish_before(items.size());
  }
}

// Moves the pages of the items in batches. All pages of a batch have the same view, range of layers and
// fence. If a page has the same target as an earlier page of the batch, it starts the next batch, so that the
// target ends up with the bytes of the later op. Items whose pages have all been moved are finished before
// the lane waits for a different fence.
void GdsLane::Shared::move(const std::vector<std::shared_ptr<WorkItem>>& items,
                           std::vector<std::vector<MoveResult>>& results,
                           const std::function<void(size_t)>& finish_before) {
  std::vector<Task> tasks;
  std::unordered_set<int32_t> targets;  // inference engine's blocks of a read, disk slots of a write
  const auto flush = [&] {
    try {
      if (!tasks.empty()) move_group(items, tasks, results);
    } catch (const std::exception& error) {
      for (const Task& task : tasks) {
        MoveResult& result = results[task.item][task.index];
        if (result.status != Status::kOk) result.reason = error.what();
      }
    }
    tasks.clear();
    targets.clear();
  };
  const auto differs = [&](const Task& a, const PageMove& b, const WorkItem& of_b) {
    const WorkItem& of_a = *items[a.item];
    return a.move.view != b.view || layers_of(of_a) != layers_of(of_b) || of_a.fence() != of_b.fence();
  };
  for (size_t p = 0; p < items.size(); ++p) {
    for (size_t i = 0; i < items[p]->positions().size(); ++i) {
      const PageMove page = items[p]->page(i);
      if (!tasks.empty() && differs(tasks.front(), page, *items[p])) {
        flush();
        finish_before(p);
      }
      const GdsGroup& group = groups[static_cast<size_t>(page.group)];
      const int32_t disk = striped_slot(page.place, disks()).disk;
      if (group.slabs[static_cast<size_t>(disk)].device < 0) {
        ++counts.misses[static_cast<size_t>(PageMiss::kDiskLost)];
        results[p][i] = {Status::kLaneDown, "disk " + std::to_string(disk) + " was not there at start", {}};
        continue;
      }
      const int32_t target = page.kind == OpKind::kGdsRead ? page.block : page.place;
      if (targets.contains(target)) flush();
      targets.insert(target);
      tasks.push_back({p, i, page});
    }
  }
  flush();
}

void GdsLane::Shared::move_group(const std::vector<std::shared_ptr<WorkItem>>& items,
                                 const std::vector<Task>& tasks,
                                 std::vector<std::vector<MoveResult>>& results) {
  const PageMove& first = tasks.front().move;
  const GdsGroup& group = groups[static_cast<size_t>(first.group)];
  const bool is_read = first.kind == OpKind::kGdsRead;
  const nvtx::Range range(is_read ? "flexkv disk to pool" : "flexkv pool to disk");
  const KvView& view = first.view->view();
  const WorkItem& item = *items[tasks.front().item];
  const bool is_last = item.last_stage() + 1 == item.stages();
  const PageMap map = PageMap::stripe(view, place_of(*group.codec, stripe, view), is_read, layers_of(item));
  std::vector<StagedPage> pages;
  std::vector<SlabPage> wanted;
  for (const Task& task : tasks) {
    const auto [disk, slot] = striped_slot(task.move.place, disks());
    const auto& [device, slab, file] = group.slabs[static_cast<size_t>(disk)];
    const int64_t at = slab.header_bytes + slot * slab.slot_bytes;
    pages.push_back({task.move.block, device, file, at});
    wanted.push_back({{slab.id, static_cast<uint64_t>(slot)}, PageTag::read(task.move.tag)});
  }
  SlabGate gate(group.codec, manager->device_ptr(), std::move(wanted), view.runs().size(),
                [&](int32_t at) { items[tasks[static_cast<size_t>(at)].item]->touch(); });
  const TransferHooks hooks{&gate, item.fence().get()};
  const TransferReport report = manager->transfer(map, pages, is_read, nullptr, false, hooks);
  std::vector<const PageFailure*> failures(tasks.size());
  for (const PageFailure& failure : report.failures) {
    failures[static_cast<size_t>(failure.position)] = &failure;
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto at = static_cast<int32_t>(i);
    MoveResult& result = results[tasks[i].item][tasks[i].index];
    if (failures[i] != nullptr) {
      result = failed(tasks[i].move, *failures[i], gate.miss(at));
      continue;
    }
    result = {Status::kOk, {}, gate.take_digests(at)};
    if (is_last) ++(is_read ? counts.read_pages : counts.written_pages);
    (is_read ? counts.read_bytes : counts.written_bytes) += map.page_bytes();
  }
}

MoveResult GdsLane::Shared::failed(const PageMove& page, const PageFailure& failure, PageMiss at_gate) {
  const PageMiss miss = miss_of(failure.cause, at_gate);
  const FailureCause cause = failure_cause_of(failure.cause, miss);
  const auto [disk, slot] = striped_slot(page.place, disks());
  const std::string why = " on " + slot_name(disk, slot) + ": " + failure.reason;
  if (page.kind == OpKind::kGdsWrite) {
    ++counts.write_errors;
    return {failure.status, "gds write" + why, {}, cause};
  }
  if (miss == PageMiss::kNone) return {failure.status, "gds read" + why, {}, cause};
  ++counts.misses[static_cast<size_t>(miss)];
  return {failure.status,
          std::string("disk miss (") + kMissNames[static_cast<size_t>(miss)] + ")" + why,
          {},
          cause};
}

int64_t most_gds_transfer_bytes() { return kMostTransferBytes + kSubBatchBytes; }

GdsLane::GdsLane(std::vector<GdsGroup> groups, int32_t stripe, std::shared_ptr<GDSManager> manager)
    : shared_(std::make_shared<Shared>()) {
  if (groups.empty()) throw ContractError("a gds lane needs a group");
  for (const GdsGroup& group : groups) {
    static_cast<void>(group.codec->image().stripe_offset(stripe));  // throws if there is no such stripe
    if (group.slabs.size() != groups.front().slabs.size() || group.slabs.empty()) {
      throw ContractError("a gds lane needs a slab of each group on each disk");
    }
  }
  for (const GdsGroup& group : groups) {
    for (size_t disk = 0; disk < group.slabs.size(); ++disk) {
      const SlabShape& shape = group.slabs[disk].shape;
      if (group.slabs[disk].device < 0) continue;
      const int64_t image = slab_slot_bytes(groups, disk, shape.id);
      if (shape.slot_bytes == image) continue;
      throw GeometryError("slots of " + std::to_string(shape.slot_bytes) + " bytes for slot images of " +
                          std::to_string(image));
    }
  }
  if (manager->device().number() != kHostDevice) device_ = cuda::Device::open(manager->device().number());
  for (const GdsGroup& group : groups) shared_->stages.push_back(read_stages(*group.codec, stripe));
  shared_->groups = std::move(groups);
  shared_->stripe = stripe;
  shared_->manager = std::move(manager);
}

PageSizes GdsLane::check(const OpSpec& op) const {
  const std::string name = "op " + std::to_string(op.op_id);
  if (op.group < 0 || static_cast<size_t>(op.group) >= shared_->groups.size()) {
    throw ContractError(name + ": group " + std::to_string(op.group) + ": the gds lane has groups [0, " +
                        std::to_string(shared_->groups.size()) + ")");
  }
  if (op.layerwise && op.kind != OpKind::kGdsRead) {
    throw ContractError(name + ": a " + to_string(op.kind) + " is never layerwise: one call writes a stripe");
  }
  const GdsGroup& group = shared_->groups[static_cast<size_t>(op.group)];
  const int64_t disks = shared_->disks();
  int64_t slots = INT32_MAX;
  for (const GdsSlab& slab : group.slabs) slots = slab.device < 0 ? slots : std::min(slots, slab.shape.slots);
  const auto bad = std::find_if(op.places.begin(), op.places.end(),
                                [&](int32_t place) { return place < 0 || place >= slots * disks; });
  if (bad != op.places.end()) {
    throw BlockRangeError("place " + std::to_string(*bad) + " at page " +
                          std::to_string(bad - op.places.begin()) + " of " + name + ": allowed are [0, " +
                          std::to_string(slots * disks) + ")");
  }
  return {group.codec->image().stripe_bytes(shared_->stripe), group.codec->layers(),
          shared_->stages[static_cast<size_t>(op.group)]};
}

void GdsLane::reserve_staging(int32_t group, const KvView& view) {
  if (group < 0 || static_cast<size_t>(group) >= shared_->groups.size()) {
    throw ContractError("group " + std::to_string(group) + ": the gds lane has groups [0, " +
                        std::to_string(shared_->groups.size()) + ")");
  }
  const GdsGroup& of = shared_->groups[static_cast<size_t>(group)];
  const StripePlace place = place_of(*of.codec, shared_->stripe, view);
  const PageMap map = PageMap::stripe(view, place, true);
  std::vector<StagedPage> samples;  // two blocks are enough to show how all blocks are aligned in memory
  for (const auto& [device, shape, file] : of.slabs) {
    if (device < 0) continue;
    for (const int64_t block : {0, 1}) samples.push_back({block, device, file, shape.header_bytes});
  }
  const std::vector<DirectPiece>& pieces = map.beside_slots()->pieces();
  if (pieces.size() == 1) {
    const DirectPiece& piece = pieces.front();
    shared_->manager->register_pool({run_address(piece, view.first_block()),
                                     view.num_blocks() - view.first_block(), piece.block_stride,
                                     piece.run_bytes});
  } else {
    shared_->manager->refuse_pool("a block lies in " + std::to_string(pieces.size()) + " pieces of it");
  }
  // Reserves staging memory also for ranges of layers: they may have to pass through staging slots even if
  // complete pages do not have to.
  const std::vector<int32_t>& starts = shared_->stages[static_cast<size_t>(group)];
  for (size_t stage = 0; starts.size() > 1 && stage < starts.size(); ++stage) {
    const int32_t end = stage + 1 < starts.size() ? starts[stage + 1] : of.codec->layers();
    shared_->manager->reserve_staging(PageMap::stripe(view, place, true, {starts[stage], end}), samples);
  }
  shared_->manager->reserve_staging(map, samples);
}

void GdsLane::start(std::shared_ptr<WorkSource> source, int32_t lane) {
  thread_ = std::thread([shared = shared_, source = std::move(source), lane] { shared->run(*source, lane); });
  pthread_setname_np(thread_.native_handle(), "flexkv-gdslane");
}

std::shared_ptr<StreamEvent> GdsLane::record(StreamId stream) { return cuda::record_engine(device_, stream); }

void GdsLane::join() {
  if (thread_.joinable()) thread_.join();
  close();
}

void GdsLane::close() { shared_->manager->close(); }

void GdsLane::release_pool() { shared_->manager->release_pool(); }

void GdsLane::restore_pool() { shared_->manager->restore_pool(); }

void GdsLane::abandon() {
  if (thread_.joinable()) thread_.detach();
}

const DiskCounts& GdsLane::counts() const { return shared_->counts; }

const GDSManager& GdsLane::manager() const { return *shared_->manager; }

}  // namespace flexkv
