// Host memory for slot images, in extents that a thread brings up in the background. It is private, or shared
// with the unit's worker processes.
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

// Unit: bytes. How much of the available memory a pool leaves free, at creation and throughout bring-up: a
// cache must not make the OOM killer end the engine that starts meanwhile (page tables, CUDA contexts, file
// cache).
inline constexpr int64_t kHeadroomBytes = int64_t{256} << 20;

struct PoolOptions {
  bool shared = false;
  bool huge_pages = true;
  int32_t numa_node = kAnyNode;                                // a preference, not a binding: see numa_node.h
  std::function<MemoryLimit()> memory = machine_memory_limit;  // called before memory is taken
};

struct ExtentReport {
  int64_t index = 0;
  int64_t bytes = 0;
  std::string pages_kind;  // "huge", "mixed", "4k" or "hugetlb"; "pending" until it is up; "attached": only
                           // the creator knows
  int64_t huge_bytes = 0;
  double bring_up_s = 0;
  bool registered = false;       // whether all of the memory is
  int32_t numa_node = kAnyNode;  // its first page's
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
  // Throws GeometryError, ConfigError for an impossible node, or CapacityError if the pool and kHeadroomBytes
  // do not fit into the memory that is available now.
  static std::shared_ptr<HostPool> create(const PoolGeometry& geometry, const PoolOptions& options);
  // Returns the pool itself in the process that made it, else a mapping of it. Throws ClosedError if the pool
  // is gone or the address now names something else, GeometryError if its header disagrees, CapacityError if
  // it cannot be mapped.
  static std::shared_ptr<HostPool> attach(const PoolAddress& address);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  const PoolGeometry& geometry() const { return table_.geometry; }
  const ExtentTable& extents() const { return table_; }
  // Where slot 0 lies in the file of a shared pool.
  int64_t slots_offset() const { return header_->slots_offset; }
  bool shared() const { return mapping_.fd() >= 0; }
  bool attached() const { return attached_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Slots [0, ready_slots()) have their memory.
  int64_t ready_slots() const;
  // Waits until `slots` slots are up, and returns whether they came up within the deadline. Returns false at
  // once if bring-up has ended with fewer.
  bool wait_ready(int64_t slots, double deadline_s) const;
  // Why no more slots will come up: bring-up ended early, or the process that ran it is gone. Empty while
  // more may come up, and once all are up.
  std::string stopped_reason() const;
  // Whether bring-up has ended, complete or not.
  bool settled() const;
  // Whether the process that made an attached pool has ended or has closed the pool. The memory stays valid.
  bool creator_gone() const;

  // Registers the memory through `registrar`, in the background, in pieces of at most kPinPieceBytes (or of
  // one slot) as their slots come up. Only a process whose device copies needs this. Only the first call per
  // pool has an effect.
  void pin(std::shared_ptr<Registrar> registrar, const PinRetries& retries = {});
  // Registration has been tried for slots [0, pinned_slots()); 0 before pin().
  int64_t pinned_slots() const { return pinned_slots_.load(std::memory_order_acquire); }
  // Whether the device knows this slot's memory. Only then may a kernel touch it.
  bool registered(int64_t slot) const { return piece_registered(pieces_.piece_of(slot)); }
  // Which slots are registered together, as one piece. No copy may span two pieces.
  const PinPieces& pieces() const { return pieces_; }
  // Names the first slots that could not be registered with the device in any try, and why: only the copy
  // engine can use them. Empty if there are none.
  std::string registration_error() const;

  // Throws BlockRangeError unless 0 <= slot < ready_slots(), ClosedError when closed or in a forked child.
  std::byte* slot(int64_t slot) const;
  // The same without checks, for movers: the engine checked the slot at submit.
  std::byte* slot_address(int64_t slot) const {
    const int64_t extent = table_.extent_of(slot);
    return slots_base_ + table_.offset_of(extent) +
           (slot - extent * table_.slots_per_extent) * table_.geometry.slot_bytes;
  }

  // The last read of each slot and its state; shared by all processes that map the pool.
  SlotArrivals slot_arrivals() const { return SlotArrivals(arrivals_); }

  std::vector<ExtentReport> report() const;
  // Throws ContractError for a private pool, which no other process can map.
  PoolAddress address() const;

  // Ends bring-up and refuses new use. The memory is freed with the last reference to the pool. In a forked
  // child this closes only the child's own pool object, and leaves what it shares with its parent unchanged.
  void close();

 private:
  HostPool(const PoolGeometry& geometry, PoolMapping mapping, bool attached, const PoolOptions& options);
  // pool_bring_up.cpp
  void bring_up();
  void bring_up_extent(int64_t index, int64_t& huge_so_far);
  void require_headroom(int64_t index) const;
  void describe_extent(int64_t index, int64_t huge_bytes, double bring_up_s);
  void publish(int64_t ready);
  static void lower_own_priority();
  // pool_pinning.cpp
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
  // Throws ClosedError in a forked child, where locks may stay held forever.
  void require_home(const char* what) const;
  std::byte* extent_base(int64_t index) const { return slots_base_ + table_.offset_of(index); }

  const ExtentTable table_;
  const PinPieces pieces_;
  PoolMapping mapping_;
  const bool attached_;
  const pid_t home_;  // the process whose threads and registrations these are
  bool huge_pages_;
  const int32_t numa_node_;
  const std::function<MemoryLimit()> memory_;
  ProcessWatch creator_;
  std::unique_ptr<PoolHeader> own_header_;              // of a private pool
  std::unique_ptr<SlotArrivals::Word[]> own_arrivals_;  // the same
  PoolHeader* header_ = nullptr;
  SlotArrivals::Word* arrivals_ = nullptr;
  std::byte* slots_base_ = nullptr;
  std::unique_ptr<std::atomic<bool>[]> registered_;  // per piece
  std::atomic<int64_t> pinned_slots_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<Registrar> registrar_;
  std::vector<ExtentReport> reports_;
  std::string stopped_reason_;
  std::string registration_error_;
  std::thread bring_up_thread_;
  std::thread pin_thread_;
};

}  // namespace flexkv
