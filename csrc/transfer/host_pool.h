// The host pool: host memory for slot images. It is divided into extents, whose memory a thread allocates in
// the background ("brings up"). A pool is private to its process, or shared with the unit's worker processes.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transfer/memory_limit.h"
#include "transfer/numa_node.h"
#include "transfer/pin_pieces.h"
#include "transfer/pool_geometry.h"
#include "transfer/pool_header.h"
#include "transfer/pool_mapping.h"
#include "transfer/process_watch.h"
#include "transfer/registrar.h"
#include "transfer/slot_arrivals.h"

namespace flexkv {

// Unit: bytes. How much of the available memory a pool leaves free, at creation and during bring-up. The
// inference engine starts at the same time and needs memory (page tables, CUDA contexts, file cache). The
// pool must not take so much that the OOM killer ends the inference engine.
inline constexpr int64_t kHeadroomBytes = int64_t{256} << 20;

struct PoolOptions {
  bool shared = false;
  bool huge_pages = true;
  // The preferred NUMA node; memory may still come from other nodes: see numa_node.h.
  int32_t numa_node = kAnyNode;
  std::function<MemoryLimit()> memory = machine_memory_limit;  // returns how much memory is available
};

// What is known about the memory of one extent.
struct ExtentReport {
  int64_t index = 0;
  int64_t bytes = 0;
  // The kind of the extent's memory pages: "huge", "mixed", "4k" or "hugetlb". "pending" until the extent is
  // up. "attached" in a process that did not make the pool, because only the process that made it knows the
  // kind.
  std::string pages_kind;
  int64_t huge_bytes = 0;        // number of bytes on huge pages
  double bring_up_s = 0;         // how many seconds bring-up took
  bool registered = false;       // whether all of the extent is registered with the device
  int32_t numa_node = kAnyNode;  // NUMA node of the extent's first memory page
};

// What another process needs to map a shared pool.
struct PoolAddress {
  pid_t pid = 0;
  int fd = -1;
  PoolToken token{};
  int64_t file_bytes = 0;
  PoolGeometry geometry;
};

class HostPool {
 public:
  // Makes a pool and starts its bring-up. Throws GeometryError for an invalid geometry, ConfigError for an
  // invalid NUMA node, and CapacityError if the pool and kHeadroomBytes do not fit into the memory that is
  // available now.
  static std::shared_ptr<HostPool> create(const PoolGeometry& geometry, const PoolOptions& options);
  // In the process that made the pool, returns the pool itself. In other processes, maps the pool and returns
  // a new object. Throws ClosedError if the pool is closed or the address now refers to a different process
  // or file, GeometryError if the pool has a different geometry than the address, and CapacityError if it
  // cannot be mapped.
  static std::shared_ptr<HostPool> attach(const PoolAddress& address);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  const PoolGeometry& geometry() const { return table_.geometry; }
  const ExtentTable& extents() const { return table_; }
  // Offset of slot 0 in the file of a shared pool; 0 in a private pool.
  int64_t slots_offset() const { return header_->slots_offset; }
  bool shared() const { return mapping_.fd() >= 0; }
  bool attached() const { return attached_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // The number of slots that are up: slots [0, ready_slots()) have their memory.
  int64_t ready_slots() const;
  // Waits until `slots` slots are up. Returns false if the deadline passes first. Returns false at once if
  // bring-up has finished with fewer slots, or if the pool is closed.
  bool wait_ready(int64_t slots, double deadline_s) const;
  // Says why no more slots will come up: bring-up has failed, or the process that made the pool has exited or
  // has closed the pool. Returns an empty text while more slots may come up, and when all slots are up.
  std::string stopped_reason() const;
  // Whether bring-up has finished, with or without success.
  bool settled() const;
  // Whether the process that made an attached pool has exited or has closed the pool. The memory stays valid.
  bool creator_gone() const;

  // Registers the memory with a device through `registrar`, in the background, as slots come up. Each piece
  // that is registered has at most kPinPieceBytes bytes, or one slot if a slot is larger. Only a process
  // whose device copies pages needs to call this. Only the first call per pool has an effect.
  void pin(std::shared_ptr<Registrar> registrar, const PinRetries& retries = {});
  // The number of slots for which registration has been tried, beginning with slot 0; 0 before pin().
  int64_t pinned_slots() const { return pinned_slots_.load(std::memory_order_acquire); }
  // Whether the memory of this slot is registered with the device. GPU kernels may access only registered
  // slots.
  bool registered(int64_t slot) const { return piece_registered(pieces_.piece_of(slot)); }
  // The pieces in which slots are registered. No single copy may cross the border of two pieces.
  const PinPieces& pieces() const { return pieces_; }
  // Says which slots could not be registered in any try, and why. Returns an empty text if there are none.
  // GPU kernels cannot access such slots, but the device's copy engine can.
  std::string registration_error() const;

  // Returns the address of a slot. Throws BlockRangeError if it is not in [0, ready_slots()), and ClosedError
  // if the pool is closed or this is a forked child.
  std::byte* slot(int64_t slot) const;
  // Does what slot() does, but without its checks. Movers call it: the transfer engine has checked the slot
  // in submit().
  std::byte* slot_address(int64_t slot) const {
    const int64_t extent = table_.extent_of(slot);
    return slots_base_ + table_.offset_of(extent) +
           (slot - extent * table_.slots_per_extent) * table_.geometry.slot_bytes;
  }

  // For each slot, a record of the last read from disk into the slot, with the read's progress. All processes
  // that map the pool share these records.
  SlotArrivals slot_arrivals() const { return SlotArrivals(arrivals_); }

  std::vector<ExtentReport> report() const;
  // Returns what another process needs to map the pool. Throws ContractError if the pool is private.
  PoolAddress address() const;

  // Stops bring-up and refuses new use of the pool. The memory is freed with the last reference to the pool.
  // In a forked child this closes only the child's pool object, and not the pool of the parent process.
  void close();

 private:
  HostPool(const PoolGeometry& geometry, PoolMapping mapping, bool attached, const PoolOptions& options);
  // The next six functions are in pool_bring_up.cpp.
  void bring_up();
  void bring_up_extent(int64_t index, int64_t& huge_so_far);
  void require_headroom(int64_t index) const;
  void describe_extent(int64_t index, int64_t huge_bytes, double bring_up_s);
  void publish(int64_t ready);
  static void lower_own_priority();
  // The next six functions are in pool_pinning.cpp.
  void rest(double seconds) const;
  bool await_slots(int64_t end) const;
  void register_all(PinRetries retries);
  void try_to_register_all(const PinRetries& retries);
  std::string register_piece(int64_t piece);
  void unregister_all();
  bool piece_registered(int64_t piece) const {
    return registered_[static_cast<size_t>(piece)].load(std::memory_order_acquire);
  }

  bool forked() const;
  // Throws ClosedError in a forked child. If a thread of the parent held a lock during the fork, that lock is
  // never released in the child.
  void require_home(const char* what) const;
  std::byte* extent_base(int64_t index) const { return slots_base_ + table_.offset_of(index); }

  const ExtentTable table_;
  const PinPieces pieces_;
  PoolMapping mapping_;
  const bool attached_;
  const pid_t home_;  // the process that made this object and has its threads and registrations
  bool huge_pages_;
  const int32_t numa_node_;
  const std::function<MemoryLimit()> memory_;
  ProcessWatch creator_;
  std::unique_ptr<PoolHeader> own_header_;  // the header of a private pool; null if shared
  // Records of slot_arrivals() in a private pool; null if shared.
  std::unique_ptr<SlotArrivals::Word[]> own_arrivals_;
  PoolHeader* header_ = nullptr;
  SlotArrivals::Word* arrivals_ = nullptr;
  std::byte* slots_base_ = nullptr;
  std::unique_ptr<std::atomic<bool>[]> registered_;  // for each piece, whether it is registered
  std::atomic<int64_t> pinned_slots_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;  // guards the members that follow
  std::shared_ptr<Registrar> registrar_;
  std::vector<ExtentReport> reports_;
  std::string stopped_reason_;
  std::string registration_error_;
  std::thread bring_up_thread_;
  std::thread pin_thread_;
};

}  // namespace flexkv
