// The bring-up thread of a host pool, which allocates the pool's memory.
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

// Unit: nice levels. The bring-up thread has a lower priority, because bring-up is not urgent and competes
// with the start of the inference engine.
constexpr int kBringUpNice = 10;
// Unit: bytes. How much memory is allocated in one step. Each step holds the process's mmap lock, which every
// page fault of the inference engine needs, so the steps are small.
constexpr int64_t kPopulateStepBytes = kHugePageBytes;
// Unit: bytes. How much memory is allocated between two checks of the available memory. A check reads /proc,
// which takes 20 us; allocating this much takes 10 to 300 ms. The amount is much smaller than kHeadroomBytes.
constexpr int64_t kMemoryLookBytes = int64_t{64} << 20;

}  // namespace

void HostPool::lower_own_priority() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kBringUpNice);  // a failure is ignored
}

void HostPool::publish(int64_t ready) {
  header_->ready_slots.store(ready, std::memory_order_release);
  announce(*header_);
}

void HostPool::require_headroom(int64_t index) const {
  if (mapping_.source() == PageSource::kHugetlb) return;  // MemAvailable does not include reserved huge pages
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
      // EINVAL means that this kernel cannot collapse memory of a memfd into huge pages. Other errors, such
      // as a lack of free huge pages, may be temporary, so later steps try again.
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

}  // namespace flexkv
