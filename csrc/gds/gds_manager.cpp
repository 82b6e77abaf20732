#include "gds/gds_manager.h"

#include <algorithm>
#include <future>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "gds/io_choice.h"

namespace flexkv {
namespace {

// Unit: pages per thread. A transfer without staging has this many pages per thread in flight: while a thread
// moves one page, its next page is already queued.
constexpr int32_t kDirectPagesPerThread = 2;
// Unit: seconds. How long a disk may take to answer one probing read. After this time, no further probing
// reads are started.
constexpr double kFileLookS = 10;
// Unit: bytes. The size of the buffer for probing reads. It is enough for every probing read; see
// FileIo::looks().
constexpr int64_t kLookBufferBytes = int64_t{1} << 20;
// Unit: bytes. The maximum size of a pool's region. No pool is larger than this.
constexpr int64_t kMostRegionBytes = int64_t{1} << 50;
// Unit: bytes. The maximum of `max_staging_bytes`. A larger value is a mistake by the caller. Up to this
// limit, sizes can be rounded up without overflow.
constexpr int64_t kMostStagingBytes = int64_t{1} << 50;

void refuse(const char* name, const std::string& value, const char* allowed) {
  throw ConfigError(std::string(name) + " is " + value + ": allowed is " + allowed);
}

const GdsOptions& checked(const GdsOptions& options) {
  if (options.round_robin < 1) refuse("round_robin", std::to_string(options.round_robin), "1 and more");
  if (options.max_staging_blocks < 1) {
    refuse("max_staging_blocks", std::to_string(options.max_staging_blocks), "1 and more");
  }
  if (options.max_staging_bytes < 1 || options.max_staging_bytes > kMostStagingBytes) {
    const std::string allowed = "from 1 to " + std::to_string(kMostStagingBytes);
    refuse("max_staging_bytes", std::to_string(options.max_staging_bytes), allowed.c_str());
  }
  if (options.most_transfer_bytes < 1) {
    refuse("most_transfer_bytes", std::to_string(options.most_transfer_bytes), "1 and more");
  }
  if (!(options.deadline_s > 0)) refuse("deadline_s", std::to_string(options.deadline_s), "more than 0");
  if (!(options.stuck_s > 0)) refuse("stuck_s", std::to_string(options.stuck_s), "more than 0");
  return options;
}

}  // namespace

// Keeps a transfer in the list running_ for as long as this object exists.
class GDSManager::Running {
 public:
  Running(GDSManager& manager, TransferControl& control) : manager_(manager), control_(control) {
    const std::lock_guard lock(manager_.mutex_);
    if (manager_.closed_) throw ClosedError("the GDS manager is closed");
    manager_.running_.insert(&control_);
  }
  ~Running() {
    const std::lock_guard lock(manager_.mutex_);
    manager_.running_.erase(&control_);
    manager_.idle_.notify_all();
  }

 private:
  GDSManager& manager_;
  TransferControl& control_;
};

GDSManager::GDSManager(const FilePaths& paths, const GdsOptions& options,
                       std::shared_ptr<TransformDevice> device)
    : options_(checked(options)), paths_(paths) {
  parts_.io = choose_io(std::make_shared<RawFiles>(paths), device, options_.io);
  parts_.threads = std::make_shared<DiskThreads>(devices(), options_.threads_per_device,
                                                 [device] { return device->bind_thread(); });
  parts_.device = std::move(device);
  pool_ = std::make_unique<PoolRegistrations>(options_.register_pool, options_.pool_piece_bytes,
                                              parts_.device, *parts_.io);
}

GDSManager::GDSManager(std::shared_ptr<const RawFiles> files, const GdsOptions& options,
                       std::shared_ptr<TransformDevice> device, std::shared_ptr<FileIo> io)
    : options_(checked(options)), paths_(files->paths()) {
  if (options_.io != IoBackend::kAuto) {
    refuse("io", options_.io == IoBackend::kUring ? "'uring'" : "'threads'",
           "'auto' where the caller makes the I/O");
  }
  parts_.io = std::move(io);
  parts_.threads = std::make_shared<DiskThreads>(devices(), options_.threads_per_device,
                                                 [device] { return device->bind_thread(); });
  parts_.device = std::move(device);
  pool_ = std::make_unique<PoolRegistrations>(options_.register_pool, options_.pool_piece_bytes,
                                              parts_.device, *parts_.io);
}

GDSManager::~GDSManager() { close(); }

void GDSManager::cancel() {
  const std::lock_guard lock(mutex_);
  for (TransferControl* control : running_) control->cancel();
}

void GDSManager::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (TransferControl* control : running_) control->cancel();
  // Each running transfer ends when its I/O has finished, or when it gives up after stuck_s.
  idle_.wait(lock, [&] { return running_.empty(); });
  if (!down_reason_.empty()) parts_.threads->abandon();
  // Each file is closed when its last reference is dropped: I/O that hangs keeps references to everything
  // that it may still touch.
  staging_ = {};
  parts_.threads = std::make_shared<DiskThreads>(0, 1, nullptr);
  lock.unlock();
  {
    const std::lock_guard pool_lock(pool_mutex_);
    pool_ = nullptr;  // must be destroyed before the I/O object, with which the pool is registered
  }
  lock.lock();
  parts_.io = nullptr;
}

void GDSManager::register_pool(const PoolRegion& region) {
  if (region.blocks < 1 || region.block_bytes < 1 || region.block_stride < region.block_bytes ||
      region.block_stride > kMostRegionBytes / region.blocks ||
      region.base > UINTPTR_MAX - static_cast<uintptr_t>(region.bytes())) {
    throw GeometryError("a pool of " + std::to_string(region.blocks) + " blocks of " +
                        std::to_string(region.block_bytes) + " bytes, one every " +
                        std::to_string(region.block_stride) + " from address " + std::to_string(region.base) +
                        ": blocks must be at least one, apart from each other, and in the address space");
  }
  TransferControl control(options_.deadline_s, options_.stuck_s);
  const Running running(*this, control);
  const std::lock_guard lock(pool_mutex_);
  pool_->add(region, [&] { look_first(control); });
}

void GDSManager::refuse_pool(std::string reason) {
  TransferControl control(options_.deadline_s, options_.stuck_s);
  const Running running(*this, control);
  const std::lock_guard lock(pool_mutex_);
  pool_->refuse(std::move(reason));
}

void GDSManager::release_pool() {
  const std::lock_guard pool_lock(pool_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (!running_.empty()) throw ContractError("release_pool: transfers of the pool are in flight");
  }
  if (pool_ != nullptr) pool_->release();
}

void GDSManager::restore_pool() {
  const std::lock_guard lock(pool_mutex_);
  if (pool_ != nullptr) pool_->restore();
}

void GDSManager::prepare_pool() {
  const std::lock_guard lock(pool_mutex_);
  if (pool_ == nullptr || !pool_->waits()) return;
  pool_->restore();
  pool_->retry();
}

PoolState GDSManager::pool() const {
  const std::lock_guard lock(pool_mutex_);
  return pool_ != nullptr ? pool_->state() : PoolState{};
}

int64_t GDSManager::slots_for(int64_t slot_bytes) const {
  if (slot_bytes > options_.max_staging_bytes) {
    throw CapacityError(
        "one block needs " + std::to_string(slot_bytes) +
        " bytes of staging, more than max_staging_bytes = " + std::to_string(options_.max_staging_bytes) +
        ": raise gds.max_staging_bytes, or switch gds.use_staged_transfer off");
  }
  const int64_t at_once = options_.most_transfer_bytes / slot_bytes + 1;
  return std::min({int64_t{options_.max_staging_blocks}, options_.max_staging_bytes / slot_bytes, at_once});
}

std::shared_ptr<StagingBuffer> GDSManager::make_staging(int64_t slots, int64_t slot_bytes) const {
  try {
    return std::make_shared<StagingBuffer>(parts_.device, parts_.io, slots * slot_bytes);
  } catch (const CapacityError& error) {
    throw CapacityError(std::string(error.what()) + "; " + std::to_string(slots) + " staging slots of " +
                        std::to_string(slot_bytes) +
                        " bytes: lower gds.max_staging_blocks or gds.max_staging_bytes, or switch "
                        "gds.use_staged_transfer off");
  }
}

std::string GDSManager::look_around(const std::shared_ptr<StagingBuffer>& buffer,
                                    const TransferControl& control) const {
  if (!buffer->not_registered().empty()) return {};
  const double answer_s = std::min(options_.stuck_s, kFileLookS);
  const auto enough = deadline_in(kFileLookS);
  // The probing reads are made one after another, because the I/O object's counts cannot tell overlapping
  // calls apart.
  for (const IoCall& call : parts_.io->looks(buffer->slot(0, 0), buffer->bytes())) {
    if (control.cancelled() || control.late() || Clock::now() >= enough) break;
    // The I/O object records the route that the read shows. An error of the read is ignored, because the
    // transfers that need the file report it. The task keeps everything that it touches alive, because this
    // function may stop waiting for the task. The task drops its references before it reports its outcome, so
    // that the buffer is not destroyed later on one of the disk's threads.
    auto look =
        std::make_shared<std::packaged_task<IoOutcome()>>([io = parts_.io, held = buffer, call]() mutable {
          IoOutcome outcome = io->transfer(call);
          held = nullptr;
          io = nullptr;
          return outcome;
        });
    std::future<IoOutcome> answer = look->get_future();
    parts_.threads->submit(call.device, [look](const std::string& not_started) {
      if (not_started.empty()) {
        (*look)();
      } else {
        look->reset();  // breaks the promise, so that waiting for `answer` ends
      }
    });
    if (answer.wait_for(to_duration(answer_s)) != std::future_status::ready) {
      return "a read of " + paths_[static_cast<size_t>(call.device)][static_cast<size_t>(call.file)] +
             " has not ended for " + std::to_string(answer_s) + " s";
    }
  }
  return {};
}

void GDSManager::look_first(const TransferControl& control) {
  if (!down_reason().empty()) return;
  std::shared_ptr<StagingBuffer> buffer;
  try {
    buffer = std::make_shared<StagingBuffer>(parts_.device, parts_.io, kLookBufferBytes);
  } catch (const CapacityError&) {
    return;  // reserve_staging() will report which setting to change
  }
  std::string why = look_around(buffer, control);
  if (!why.empty()) take_down(std::move(why));
}

void GDSManager::take_down(std::string reason) {
  std::shared_ptr<StagingBuffer> left;
  const std::lock_guard lock(mutex_);
  down_reason_ = std::move(reason);
  left = std::exchange(staging_, {}).buffer;
}

std::shared_ptr<StagingBuffer> GDSManager::own_staging(const PageMap& map, const TransferControl& control) {
  const int64_t slot = map.slot_bytes();
  const int64_t slots = slots_for(slot);
  std::shared_ptr<StagingBuffer> buffer;
  {
    const std::lock_guard lock(mutex_);
    if (!down_reason_.empty()) return nullptr;
    // The buffer's size depends only on the geometry of the pages, not on the transfer. So a new buffer is
    // made only if a group needs more bytes than the buffer has.
    if (staging_.buffer != nullptr && staging_.buffer->bytes() >= slots * slot) {
      staging_.slots = {slots, slot};
      return staging_.buffer;
    }
    buffer = std::exchange(staging_, {}).buffer;
  }
  buffer = nullptr;  // frees the old buffer before the larger buffer is allocated
  buffer = make_staging(slots, slot);
  if (std::string why = look_around(buffer, control); !why.empty()) {
    take_down(std::move(why));
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  staging_ = {buffer, {slots, slot}};
  return buffer;
}

void GDSManager::reserve_staging(const PageMap& map, std::span<const StagedPage> samples, bool force_direct) {
  TransferControl control(options_.deadline_s, options_.stuck_s);
  const Running running(*this, control);
  const Way way = way_of(map, samples, force_direct);
  if (way == Way::kStraight) return;
  const std::lock_guard turn(staging_mutex_);
  if (own_staging(way == Way::kBeside ? *map.beside_slots() : map, control) == nullptr) {
    throw DiskError(down_reason());
  }
}

void GDSManager::check_pages(std::span<const StagedPage> pages, bool is_read) const {
  using Place = std::tuple<int32_t, int64_t, int64_t>;
  std::vector<Place> places;
  std::vector<int64_t> blocks;
  for (const StagedPage& page : pages) {
    if (!has_file(page.device, page.file)) {
      const bool known = page.device >= 0 && page.device < devices();
      throw BlockRangeError(
          "file " + std::to_string(page.file) + " of device " + std::to_string(page.device) + ": there are " +
          std::to_string(devices()) + " devices" +
          (known ? ", this one with " + std::to_string(paths_[static_cast<size_t>(page.device)].size()) +
                       " files"
                 : std::string()));
    }
    places.emplace_back(page.device, page.file, page.file_offset);
    blocks.push_back(page.block);
  }
  std::sort(places.begin(), places.end());
  if (!is_read && std::adjacent_find(places.begin(), places.end()) != places.end()) {
    throw BlockRangeError("a block of the files is named twice in one write");
  }
  if (!is_read) return;  // a write may copy one block to several places, so only reads are checked
  std::sort(blocks.begin(), blocks.end());
  const auto twice = std::adjacent_find(blocks.begin(), blocks.end());
  if (twice != blocks.end()) {
    throw BlockRangeError("block " + std::to_string(*twice) + " of the pool is named twice in one read");
  }
}

GDSManager::Way GDSManager::way_of(const PageMap& map, std::span<const StagedPage> pages,
                                   bool force_direct) const {
  // For a page in one piece, a staging slot brings no advantage. Pages in several pieces are moved directly
  // only if the options say so.
  const PageMap* beside = map.beside_slots();
  const bool unknown_too = options_.register_pool == RegisterPool::kOn;
  if (beside != nullptr && (beside->one_piece() || !options_.use_staged_transfer) &&
      can_go_direct(*parts_.io, *beside, pages, unknown_too)) {
    return Way::kBeside;
  }
  const bool must_stage = map.pieces().empty();
  if (!must_stage && (force_direct || !options_.use_staged_transfer)) return Way::kStraight;
  // Pages without digests are moved directly if they are in one piece and their calls would not be bounced.
  if (map.one_piece() && can_go_direct(*parts_.io, map, pages, unknown_too)) return Way::kStraight;
  return Way::kStaged;
}

TransferReport GDSManager::dispatch(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                                    std::shared_ptr<StagingBuffer> staging, bool force_direct,
                                    const TransferControl& control, const TransferHooks& hooks) {
  switch (way_of(map, pages, force_direct)) {
    case Way::kStraight:
      return transfer_direct(parts_, map, pages, is_read, options_.threads_per_device * kDirectPagesPerThread,
                             control, hooks);
    case Way::kBeside:
      return dispatch_staged(*map.beside_slots(), pages, is_read, std::move(staging), control, hooks);
    default:
      return dispatch_staged(map, pages, is_read, std::move(staging), control, hooks);
  }
}

TransferReport GDSManager::dispatch_staged(const PageMap& map, std::span<const StagedPage> pages,
                                           bool is_read, std::shared_ptr<StagingBuffer> staging,
                                           const TransferControl& control, const TransferHooks& hooks) {
  if (staging) {
    return transfer_staged(parts_, map, pages, is_read, staging, staging->slots_of(map.slot_bytes()), control,
                           hooks);
  }
  const std::lock_guard turn(staging_mutex_);
  const auto own = own_staging(map, control);
  if (own == nullptr) {
    TransferReport report;
    report.staged = !map.in_place();
    report.pages = static_cast<int64_t>(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      report.failures.push_back(
          {static_cast<int32_t>(i), Status::kLaneDown, down_reason(), StagedFailure::kDevice});
    }
    return report;
  }
  TransferReport report =
      transfer_staged(parts_, map, pages, is_read, own, options_.max_staging_blocks, control, hooks);
  if (report.stuck) take_down(report.failures.back().reason);
  return report;
}

TransferReport GDSManager::transfer(const PageMap& map, std::span<const StagedPage> pages, bool is_read,
                                    std::shared_ptr<StagingBuffer> staging, bool force_direct,
                                    const TransferHooks& hooks) {
  TransferControl control(options_.deadline_s, options_.stuck_s);
  const Running running(*this, control);
  check_pages(pages, is_read);
  prepare_pool();
  TransferReport report =
      pages.empty() ? TransferReport{}
                    : dispatch(map, pages, is_read, std::move(staging), force_direct, control, hooks);
  const std::lock_guard lock(mutex_);
  totals_.transfers += 1;
  totals_.pages += report.pages;
  if (!report.staged) totals_.straight_pages += report.pages;
  totals_.failed_pages += static_cast<int64_t>(report.failures.size());
  totals_.io_calls += report.io_calls;
  totals_.bounced_calls += report.bounced_calls;
  totals_.unknown_calls += report.unknown_calls;
  totals_.io_bytes += report.io_bytes;
  totals_.launches += report.launches;
  return report;
}

bool GDSManager::has_file(int32_t device, int64_t file) const {
  return device >= 0 && device < devices() && file >= 0 &&
         file < static_cast<int64_t>(paths_[static_cast<size_t>(device)].size());
}

GdsTotals GDSManager::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

std::string GDSManager::describe() const {
  std::unique_lock lock(mutex_);
  if (closed_) return "closed";
  std::string text = parts_.io->name() + " to " + parts_.device->name();
  const bool bounces = staging_.buffer != nullptr && !staging_.buffer->not_registered().empty();
  if (bounces) text += "; staging is not registered: " + staging_.buffer->not_registered();
  lock.unlock();
  const PoolState found = pool();
  if (found.pieces > 0) {
    text += "; the pool is registered: " + std::to_string(found.pieces) + " pieces, " +
            std::to_string(found.bytes) + " bytes";
  }
  if (!found.refusal.empty()) text += "; the pool passes through staging: " + found.refusal;
  return text;
}

std::string GDSManager::direct_refusal() const {
  const std::lock_guard lock(mutex_);
  return closed_ ? "closed" : parts_.io->direct_refusal();
}

std::string GDSManager::down_reason() const {
  const std::lock_guard lock(mutex_);
  return down_reason_;
}

int32_t GDSManager::threads() const {
  const std::lock_guard lock(mutex_);
  return parts_.threads->started();
}

int64_t GDSManager::staging_bytes() const {
  const std::lock_guard lock(mutex_);
  return staging_.buffer ? staging_.buffer->bytes() : 0;
}

GDSManager::StagingSlots GDSManager::staging_slots() const {
  const std::lock_guard lock(mutex_);
  return staging_.slots;
}

}  // namespace flexkv
