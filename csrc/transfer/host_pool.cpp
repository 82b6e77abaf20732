#include "transfer/host_pool.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>

#include "base/align.h"
#include "base/error.h"
#include "transfer/deadline.h"
#include "transfer/memory_limit.h"

namespace flexkv {
namespace {

// Unit: nice levels. Touching memory competes with the engine's own start; it may take its time.
constexpr int kBringUpNice = 10;
// Unit: bytes. Populating holds the process's mmap lock, which every page fault of the engine needs: small
// steps.
constexpr int64_t kPopulateStepBytes = kHugePageBytes;
// Unit: seconds. How often an attached pool's follower looks for its own close besides being woken.
constexpr double kFollowerWaitS = 1.0;

int64_t alignment(const PoolGeometry& g) {
  return std::min(g.extent_bytes, g.slots * g.slot_bytes) >= kHugePageBytes ? kHugePageBytes : kIoAlignBytes;
}

void check(const PoolGeometry& g) {
  if (g.slot_bytes <= 0 || g.slot_bytes % kIoAlignBytes != 0) {
    throw GeometryError("slot_bytes=" + std::to_string(g.slot_bytes) + ": must be a positive multiple of " +
                        std::to_string(kIoAlignBytes));
  }
  if (g.extent_bytes < g.slot_bytes || g.extent_bytes > kMaxExtentBytes) {
    throw GeometryError("extent_bytes=" + std::to_string(g.extent_bytes) + ": must be in [slot_bytes=" +
                        std::to_string(g.slot_bytes) + ", " + std::to_string(kMaxExtentBytes) + "]");
  }
  const int64_t most =
      (int64_t{1} << 46) / g.slot_bytes;  // half of the user address space, so that sums cannot wrap
  if (g.slots < 1 || g.slots > std::min<int64_t>(most, INT32_MAX)) {
    throw GeometryError("slots=" + std::to_string(g.slots) + ": must be in [1, " +
                        std::to_string(std::min<int64_t>(most, INT32_MAX)) + "]");
  }
}

struct Span {
  int64_t slots_per_extent, stride, bytes;
};

Span span_of(const PoolGeometry& g) {
  const int64_t unit = alignment(g);
  const int64_t per_extent = g.extent_bytes / g.slot_bytes;
  const int64_t stride = round_up(per_extent * g.slot_bytes, unit);
  const int64_t whole = g.slots / per_extent;
  return {per_extent, stride, whole * stride + round_up(g.slots % per_extent * g.slot_bytes, unit)};
}

void require_memory(int64_t bytes, const std::string& what) {
  const MemoryLimit limit = available_memory();
  if (bytes > limit.available_bytes) {
    throw CapacityError(what + ": " + std::to_string(bytes) + " bytes asked, " +
                        std::to_string(limit.available_bytes) + " allowed by " + limit.source);
  }
}

PoolToken random_token() {
  PoolToken token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    throw CapacityError(std::string("getrandom: ") + std::strerror(errno));
  }
  return token;
}

// Pools of this process by token, so that attaching at home gives the pool itself.
std::mutex registry_mutex;
std::map<PoolToken, std::weak_ptr<HostPool>>& registry() {
  static auto* pools =
      new std::map<PoolToken, std::weak_ptr<HostPool>>();  // never destroyed: outlives all pools
  return *pools;
}

}  // namespace

std::shared_ptr<HostPool> HostPool::create(const PoolGeometry& geometry, bool shared, bool huge_pages,
                                           std::shared_ptr<Registrar> registrar) {
  check(geometry);
  const Span span = span_of(geometry);
  const int64_t header_bytes = shared ? alignment(geometry) : 0;
  const bool reserved = shared && huge_pages && free_hugetlb_bytes() >= span.bytes + header_bytes;
  if (!reserved) {  // reserved huge pages are not in MemAvailable
    require_memory(span.bytes + header_bytes, "host pool of " + std::to_string(geometry.slots) +
                                                  " slots of " + std::to_string(geometry.slot_bytes) +
                                                  " bytes");
  }
  PoolMapping mapping = shared ? PoolMapping::memfd(span.bytes + header_bytes, huge_pages)
                               : PoolMapping::anonymous(span.bytes, huge_pages);
  if (shared) mapping.populate(0, kIoAlignBytes);
  std::shared_ptr<HostPool> pool(
      new HostPool(geometry, std::move(mapping), false, huge_pages, std::move(registrar)));
  {
    const std::lock_guard lock(registry_mutex);
    registry()[pool->header_->token] = pool;
  }
  pool->thread_ = std::thread(&HostPool::bring_up, pool.get());
  return pool;
}

std::shared_ptr<HostPool> HostPool::attach(const PoolAddress& address, std::shared_ptr<Registrar> registrar) {
  check(address.geometry);
  {
    const std::lock_guard lock(registry_mutex);
    const auto found = registry().find(address.token);
    if (found != registry().end() && address.pid == getpid()) {
      if (auto pool = found->second.lock(); pool && !pool->closed()) return pool;
    }
  }
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const std::string what = "shared pool at " + path;
  // Look before opening: opening a recycled number could block on a FIFO or wake a device.
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof(target) - 1) < 0) {
    throw ClosedError(what + ": " + std::strerror(errno));
  }
  if (std::string(target).rfind("/memfd:flexkv-pool", 0) != 0) {
    throw ClosedError(what + " is not the pool any more: it is " + target);
  }
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw ClosedError(what + ": " + std::strerror(errno));
  PoolMapping mapping = PoolMapping::of_fd(fd, address.file_bytes, what);
  const auto* header = reinterpret_cast<const PoolHeader*>(mapping.base());
  if (address.file_bytes < kIoAlignBytes || header->magic != kPoolMagic || header->token != address.token) {
    throw ClosedError(what + " was closed, or is not the pool any more: its token differs");
  }
  const Span span = span_of(address.geometry);
  const PoolGeometry found{header->slot_bytes, header->slots, header->extent_bytes};
  if (found != address.geometry || header->slots_offset + span.bytes > address.file_bytes) {
    throw GeometryError(
        what + ": it has " + std::to_string(found.slots) + " slots of " + std::to_string(found.slot_bytes) +
        " bytes in extents of " + std::to_string(found.extent_bytes) + ", expected " +
        std::to_string(address.geometry.slots) + " of " + std::to_string(address.geometry.slot_bytes) +
        " in " + std::to_string(address.geometry.extent_bytes));
  }
  std::shared_ptr<HostPool> pool(
      new HostPool(address.geometry, std::move(mapping), true, false, std::move(registrar)));
  if (pool->registrar_->active()) pool->thread_ = std::thread(&HostPool::follow_creator, pool.get());
  return pool;
}

HostPool::HostPool(const PoolGeometry& geometry, PoolMapping mapping, bool attached, bool huge_pages,
                   std::shared_ptr<Registrar> registrar)
    : geometry_(geometry),
      mapping_(std::move(mapping)),
      attached_(attached),
      home_(getpid()),
      huge_pages_(huge_pages),
      registrar_(std::move(registrar)) {
  const Span span = span_of(geometry_);
  slots_per_extent_ = span.slots_per_extent;
  extent_stride_ = span.stride;
  if (!shared()) {
    own_header_ = std::make_unique<PoolHeader>();
    header_ = own_header_.get();
  } else if (!attached_) {
    header_ = new (mapping_.base()) PoolHeader();
  } else {
    header_ = reinterpret_cast<PoolHeader*>(mapping_.base());
  }
  if (!attached_) {
    header_->token = random_token();
    header_->slot_bytes = geometry_.slot_bytes;
    header_->slots = geometry_.slots;
    header_->extent_bytes = geometry_.extent_bytes;
    header_->slots_offset = shared() ? alignment(geometry_) : 0;
    header_->magic = kPoolMagic;
  }
  slots_base_ = mapping_.base() + header_->slots_offset;
  for (int64_t i = 0; i < extents(); ++i) {
    reports_.push_back(
        {.index = i, .bytes = extent_bytes(i), .pages_kind = attached_ ? "attached" : "pending"});
  }
}

HostPool::~HostPool() {
  close();
  if (forked()) {
    new std::thread(std::move(thread_));  // not here: it cannot be joined
    return;
  }
  for (const ExtentReport& extent : reports_) {
    if (extent.registered) registrar_->remove(extent_base(extent.index));
  }
}

bool HostPool::forked() const { return getpid() != home_; }

int64_t HostPool::extents() const { return (geometry_.slots + slots_per_extent_ - 1) / slots_per_extent_; }

int64_t HostPool::extent_slots(int64_t index) const {
  return std::min(slots_per_extent_, geometry_.slots - index * slots_per_extent_);
}

int64_t HostPool::extent_bytes(int64_t index) const {
  return round_up(extent_slots(index) * geometry_.slot_bytes, alignment(geometry_));
}

int64_t HostPool::ready_slots() const {
  if (attached_ && registrar_->active()) return registered_slots_.load(std::memory_order_acquire);
  return header_->ready_slots.load(std::memory_order_acquire);
}

bool HostPool::settled() const {
  return header_->finished.load(std::memory_order_acquire) != 0 ||
         header_->ready_slots.load(std::memory_order_acquire) == geometry_.slots;
}

bool HostPool::wait_ready(int64_t slots, double deadline_s) const {
  if (slots > geometry_.slots) {
    throw BlockRangeError("wait_ready(" + std::to_string(slots) + "): the pool has " +
                          std::to_string(geometry_.slots) + " slots");
  }
  const auto deadline = deadline_in(deadline_s);
  for (;;) {
    const uint32_t seen = header_->generation.load(std::memory_order_acquire);
    if (ready_slots() >= slots) return true;
    const double left_s = seconds_until(deadline);
    const bool short_of_it = settled() && header_->ready_slots.load(std::memory_order_acquire) < slots;
    if (left_s <= 0 || short_of_it || closed()) return false;
    await_change(*header_, seen, left_s);
  }
}

std::string HostPool::stopped_reason() const {
  const std::lock_guard lock(mutex_);
  return stopped_reason_;
}

std::string HostPool::registration_error() const {
  const std::lock_guard lock(mutex_);
  return registration_error_;
}

std::byte* HostPool::slot(int64_t slot) const {
  if (closed()) throw ClosedError("slot " + std::to_string(slot) + ": the host pool was closed");
  const int64_t ready = ready_slots();
  if (slot < 0 || slot >= ready) {
    throw BlockRangeError("slot " + std::to_string(slot) + ": allowed are [0, " + std::to_string(ready) +
                          ") (ready), of " + std::to_string(geometry_.slots));
  }
  return slot_address(slot);
}

std::vector<ExtentReport> HostPool::report() const {
  const std::lock_guard lock(mutex_);
  return reports_;
}

PoolAddress HostPool::address() const {
  if (!shared())
    throw ContractError("a private host pool cannot be mapped by another process: make it shared");
  return {getpid(), mapping_.fd(), header_->token, mapping_.bytes(), geometry_};
}

void HostPool::publish(int64_t ready) {
  header_->ready_slots.store(ready, std::memory_order_release);
  announce(*header_);
}

void HostPool::stop_short(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  stopped_reason_ = reason;
}

void HostPool::register_extent(int64_t index) {
  const std::string reason = registrar_->add(extent_base(index), extent_bytes(index));
  const std::lock_guard lock(mutex_);
  reports_[static_cast<size_t>(index)].registered = reason.empty();
  if (!reason.empty() && registration_error_.empty()) {
    registration_error_ = "extent " + std::to_string(index) + ": " + reason;
  }
}

void HostPool::bring_up() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)),
              kBringUpNice);  // best effort, of this thread
  try {
    int64_t huge_so_far = mapping_.huge_bytes();
    for (int64_t i = 0; i < extents() && !stopping_; ++i) {
      if (mapping_.source() != PageSource::kHugetlb) {
        require_memory(extent_bytes(i), "extent " + std::to_string(i) + " of the host pool");
      }
      bring_up_extent(i, huge_so_far);
    }
  } catch (const CapacityError& error) {
    stop_short(error.what());
  } catch (const std::exception& error) {
    stop_short(std::string("bring-up: ") + error.what());
  }
  header_->finished.store(1, std::memory_order_release);
  announce(*header_);
}

void HostPool::bring_up_extent(int64_t index, int64_t& huge_so_far) {
  const auto start = Clock::now();
  const int64_t bytes = extent_bytes(index);
  const int64_t offset = extent_base(index) - mapping_.base();
  const int64_t first_slot = index * slots_per_extent_;
  for (int64_t done = 0; done < bytes && !stopping_;) {
    const int64_t step = std::min(kPopulateStepBytes, bytes - done);
    mapping_.populate(offset + done, step);
    if (huge_pages_ && mapping_.source() == PageSource::kMemfd && step == kHugePageBytes) {
      // A kernel that cannot do it (EINVAL) will not learn to; one out of whole huge pages may find some
      // later.
      if (mapping_.collapse(offset + done) == EINVAL) huge_pages_ = false;
    }
    done += step;
    // Without a device a slot can be used as soon as it has memory; with one, when its extent is registered.
    if (!registrar_->active() && done < bytes) {
      publish(first_slot + std::min(extent_slots(index), done / geometry_.slot_bytes));
    }
  }
  if (stopping_) return;
  const int64_t huge_now = mapping_.huge_bytes();
  const int64_t huge = std::clamp<int64_t>(huge_now - huge_so_far, 0, bytes);
  huge_so_far = huge_now;
  {
    const std::lock_guard lock(mutex_);
    ExtentReport& report = reports_[static_cast<size_t>(index)];
    report.huge_bytes = mapping_.source() == PageSource::kHugetlb ? bytes : huge;
    report.bring_up_s = seconds_since(start);
    report.pages_kind = mapping_.source() == PageSource::kHugetlb ? "hugetlb"
                        : huge >= bytes                           ? "huge"
                        : huge > 0                                ? "mixed"
                                                                  : "4k";
  }
  if (registrar_->active()) register_extent(index);
  publish(first_slot + extent_slots(index));
}

void HostPool::follow_creator() {
  for (int64_t i = 0; i < extents() && !stopping_; ++i) {
    const int64_t end = i * slots_per_extent_ + extent_slots(i);
    for (;;) {
      const uint32_t seen = header_->generation.load(std::memory_order_acquire);
      // Asked first: bring-up may end, with this extent, between the two questions.
      const bool over = settled();
      if (stopping_ || header_->ready_slots.load(std::memory_order_acquire) >= end) break;
      if (over) return;
      await_change(*header_, seen, kFollowerWaitS);
    }
    if (stopping_) return;
    register_extent(i);
    registered_slots_.store(end, std::memory_order_release);
    announce(*header_);
  }
}

void HostPool::close() {
  closed_.store(true, std::memory_order_release);
  if (forked()) return;
  if (!attached_) header_->magic = 0;
  stopping_ = true;
  announce(*header_);
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
  const std::lock_guard lock(registry_mutex);
  const auto found = registry().find(header_->token);
  if (!attached_ && found != registry().end()) registry().erase(found);
}

}  // namespace flexkv
