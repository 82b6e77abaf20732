// How a host pool gets its memory, and how that is made known to a device: the work of its two threads.
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "transfer/deadline.h"
#include "transfer/host_pool.h"

namespace flexkv {
namespace {

// Unit: nice levels. Touching memory competes with the engine's own start; it may take its time.
constexpr int kBringUpNice = 10;
// Unit: bytes. Populating holds the process's mmap lock, which every page fault of the engine needs: small
// steps.
constexpr int64_t kPopulateStepBytes = kHugePageBytes;
// Unit: bytes. How often the memory left is looked at: 20 us of reading /proc for 10-300 ms of touching, and
// far less than kHeadroomBytes.
constexpr int64_t kMemoryLookBytes = int64_t{64} << 20;
// Unit: seconds. How often a thread that waits for extents looks whether their creator still lives.
constexpr double kFollowerWaitS = 0.25;

void lower_own_priority() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kBringUpNice);  // best effort
}

}  // namespace

void HostPool::publish(int64_t ready) {
  header_->ready_slots.store(ready, std::memory_order_release);
  announce(*header_);
}

void HostPool::require_headroom(int64_t index) const {
  if (mapping_.source() == PageSource::kHugetlb) return;  // reserved huge pages are not in MemAvailable
  const MemoryLimit limit = memory_();
  if (limit.available_bytes >= kHeadroomBytes + kMemoryLookBytes) return;
  throw CapacityError("extent " + std::to_string(index) +
                      " of the host pool: " + std::to_string(limit.available_bytes) + " bytes are left by " +
                      limit.source + ", of which " + std::to_string(kHeadroomBytes) + " are kept free");
}

void HostPool::bring_up() {
  lower_own_priority();
  std::string stopped;
  try {
    int64_t huge_so_far = mapping_.huge_bytes();
    for (int64_t i = 0; i < table_.count && !stopping_; ++i) bring_up_extent(i, huge_so_far);
  } catch (const CapacityError& error) {
    stopped = error.what();
  } catch (const std::exception& error) {
    stopped = std::string("bring-up: ") + error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_reason_ = stopped;
  }
  header_->finished.store(1, std::memory_order_release);
  announce(*header_);
}

void HostPool::bring_up_extent(int64_t index, int64_t& huge_so_far) {
  const auto start = Clock::now();
  const int64_t bytes = table_.bytes_of(index);
  const int64_t offset = extent_base(index) - mapping_.base();
  const int64_t first_slot = index * table_.slots_per_extent;
  if (numa_node_ != kAnyNode) {
    if (const std::string error = prefer_node(extent_base(index), bytes, numa_node_); !error.empty()) {
      throw CapacityError("host pool: " + error);
    }
  }
  for (int64_t done = 0; done < bytes && !stopping_;) {
    if (done % kMemoryLookBytes == 0) require_headroom(index);
    const int64_t step = std::min(kPopulateStepBytes, bytes - done);
    mapping_.populate(offset + done, step);
    if (huge_pages_ && mapping_.source() == PageSource::kMemfd && step == kHugePageBytes) {
      // A kernel that cannot do it (EINVAL) will not learn to; one out of whole huge pages may find some
      // later.
      if (mapping_.collapse(offset + done) == EINVAL) huge_pages_ = false;
    }
    done += step;
    if (done < bytes) {
      publish(first_slot + std::min(table_.slots_of(index), done / table_.geometry.slot_bytes));
    }
  }
  if (stopping_) return;
  const int64_t huge_now = mapping_.huge_bytes();
  describe_extent(index, std::clamp<int64_t>(huge_now - huge_so_far, 0, bytes), seconds_since(start));
  huge_so_far = huge_now;
  publish(first_slot + table_.slots_of(index));
}

void HostPool::describe_extent(int64_t index, int64_t huge_bytes, double bring_up_s) {
  const bool reserved = mapping_.source() == PageSource::kHugetlb;
  const std::lock_guard lock(mutex_);
  ExtentReport& report = reports_[static_cast<size_t>(index)];
  report.huge_bytes = reserved ? report.bytes : huge_bytes;
  report.bring_up_s = bring_up_s;
  report.numa_node = node_of(extent_base(index));
  report.pages_kind = reserved                     ? "hugetlb"
                      : huge_bytes >= report.bytes ? "huge"
                      : huge_bytes > 0             ? "mixed"
                                                   : "4k";
}

void HostPool::pin(std::shared_ptr<Registrar> registrar) {
  require_home("pin");
  const std::lock_guard lock(mutex_);
  if (registrar_ || closed()) return;
  registrar_ = std::move(registrar);
  pin_thread_ = std::thread(&HostPool::register_extents, this);
  pthread_setname_np(pin_thread_.native_handle(), "flexkv-pin");
}

void HostPool::register_extents() {
  lower_own_priority();
  for (int64_t i = 0; i < table_.count && !stopping_; ++i) {
    const int64_t end = i * table_.slots_per_extent + table_.slots_of(i);
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
    pinned_slots_.store(end, std::memory_order_release);
    announce(*header_);
  }
}

void HostPool::register_extent(int64_t index) {
  const std::string reason = registrar_->add(extent_base(index), table_.bytes_of(index));
  registered_[static_cast<size_t>(index)].store(reason.empty(), std::memory_order_release);
  const std::lock_guard lock(mutex_);
  reports_[static_cast<size_t>(index)].registered = reason.empty();
  if (!reason.empty() && registration_error_.empty()) {
    registration_error_ = "extent " + std::to_string(index) + ": " + reason;
  }
}

}  // namespace flexkv
