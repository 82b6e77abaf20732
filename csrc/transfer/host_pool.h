// Host memory for slot images, in extents that come up in the background. Private, or shared with the worker
// processes of the unit.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transfer/pool_header.h"
#include "transfer/pool_mapping.h"
#include "transfer/registrar.h"

namespace flexkv {

// Unit: bytes. io_uring refuses a registered buffer above 1 GiB (EFAULT), so no extent is larger.
inline constexpr int64_t kMaxExtentBytes = int64_t{1} << 30;

struct PoolGeometry {
  int64_t slot_bytes = 0;  // a multiple of 4 KiB
  int64_t slots = 0;
  int64_t extent_bytes = kMaxExtentBytes;

  bool operator==(const PoolGeometry&) const = default;
};

struct ExtentReport {
  int64_t index = 0;
  int64_t bytes = 0;
  std::string pages_kind;  // "huge", "mixed", "4k" or "hugetlb"; "pending" until it is up; "attached": the
                           // creator knows
  int64_t huge_bytes = 0;
  double bring_up_s = 0;
  bool registered = false;
};

// Everything another process needs to map a shared pool.
struct PoolAddress {
  pid_t pid = 0;
  int fd = -1;
  PoolToken token{};
  int64_t file_bytes = 0;
  PoolGeometry geometry;
};

class HostPool {
 public:
  // Throws GeometryError, or CapacityError when the pool would not fit the memory that is available now.
  static std::shared_ptr<HostPool> create(const PoolGeometry& geometry, bool shared, bool huge_pages,
                                          std::shared_ptr<Registrar> registrar = cuda_registrar());
  // The pool itself in the process that made it; else a mapping of it. Throws ClosedError when it is gone or
  // the numbers now name something else, GeometryError when its header disagrees, CapacityError when it
  // cannot be mapped.
  static std::shared_ptr<HostPool> attach(const PoolAddress& address,
                                          std::shared_ptr<Registrar> registrar = cuda_registrar());
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  const PoolGeometry& geometry() const { return geometry_; }
  bool shared() const { return mapping_.fd() >= 0; }
  bool attached() const { return attached_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  int64_t extents() const;

  // Slots [0, ready_slots()) are up, here and (where there is a device) registered.
  int64_t ready_slots() const;
  // Whether `slots` slots came up within the deadline; false at once when bring-up ended short of it.
  bool wait_ready(int64_t slots, double deadline_s) const;
  // Why bring-up ended short of all slots; empty when it did not.
  std::string stopped_reason() const;
  // The first extent that could not be registered with the device, and why: only the copy engine can use such
  // an extent (`registered` in the report is false). Empty while there is none.
  std::string registration_error() const;
  // Whether bring-up is over, for better or worse.
  bool settled() const;

  // Throws BlockRangeError unless 0 <= slot < ready_slots().
  std::byte* slot(int64_t slot) const;
  // The same unchecked, for movers: the engine checked the number at submit.
  std::byte* slot_address(int64_t slot) const {
    return slots_base_ + slot / slots_per_extent_ * extent_stride_ +
           slot % slots_per_extent_ * geometry_.slot_bytes;
  }

  std::vector<ExtentReport> report() const;
  // Throws ContractError for a private pool, which no other process can map.
  PoolAddress address() const;

  // Ends bring-up and refuses new use. The memory goes when the last holder of the pool does. In a forked
  // child only the child's own pool object is closed: what it shares with its parent stays as it is.
  void close();

 private:
  HostPool(const PoolGeometry& geometry, PoolMapping mapping, bool attached, bool huge_pages,
           std::shared_ptr<Registrar> registrar);
  void bring_up();
  void follow_creator();
  void bring_up_extent(int64_t index, int64_t& huge_so_far);
  void register_extent(int64_t index);
  void publish(int64_t ready);
  void stop_short(const std::string& reason);
  bool forked() const;
  int64_t extent_slots(int64_t index) const;
  int64_t extent_bytes(int64_t index) const;
  std::byte* extent_base(int64_t index) const { return slots_base_ + index * extent_stride_; }

  const PoolGeometry geometry_;
  PoolMapping mapping_;
  const bool attached_;
  const pid_t home_;  // the process whose thread and registrations these are
  bool huge_pages_;
  const std::shared_ptr<Registrar> registrar_;
  std::unique_ptr<PoolHeader> own_header_;  // of a private pool
  PoolHeader* header_ = nullptr;
  std::byte* slots_base_ = nullptr;
  int64_t slots_per_extent_ = 0;
  int64_t extent_stride_ = 0;
  std::atomic<int64_t> registered_slots_{0};  // of an attached pool with a device: follows the creator
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;  // guards reports_, stopped_reason_, registration_error_, thread_
  std::vector<ExtentReport> reports_;
  std::string stopped_reason_;
  std::string registration_error_;
  std::thread thread_;
};

}  // namespace flexkv
