#include "transfer/host_pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <system_error>

#include "base/error.h"
#include "transfer/deadline.h"

namespace flexkv {
namespace {

// Unit: seconds. A wait on an attached pool checks at this interval whether the process that made the pool
// still runs.
constexpr double kCreatorLookS = 0.25;

void require_memory(const PoolOptions& options, int64_t bytes, const std::string& what) {
  const MemoryLimit limit = options.memory();
  if (bytes <= limit.available_bytes - kHeadroomBytes) return;
  throw CapacityError(what + ": " + std::to_string(bytes) + " bytes asked, " +
                      std::to_string(std::max<int64_t>(0, limit.available_bytes - kHeadroomBytes)) +
                      " allowed by " + limit.source + " less " + std::to_string(kHeadroomBytes) +
                      " that are kept free");
}

// Returns how many bytes the header and the records of slot arrivals take in the memfd, before the first
// slot.
int64_t head_bytes(const PoolGeometry& geometry) {
  return kIoAlignBytes + SlotArrivals::bytes_for(geometry.slots);
}

PoolToken random_token() {
  PoolToken token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    throw CapacityError(std::string("getrandom: ") + std::strerror(errno));
  }
  return token;
}

// The pools that this process made, each under its token. With this table, attach() in the same process can
// return the pool itself.
std::mutex registry_mutex;
std::map<PoolToken, std::weak_ptr<HostPool>>& registry() {
  // The map is never destroyed, so that it outlives all pools.
  static auto* pools = new std::map<PoolToken, std::weak_ptr<HostPool>>();
  return *pools;
}

}  // namespace

std::shared_ptr<HostPool> HostPool::create(const PoolGeometry& geometry, const PoolOptions& options) {
  geometry.check();
  if (options.numa_node < kAnyNode || options.numa_node >= kMostNodes) {
    throw ConfigError("numa_node=" + std::to_string(options.numa_node) + ": must be in [0, " +
                      std::to_string(kMostNodes) + "), or -1 for any");
  }
  const ExtentTable table(geometry);
  const int64_t header_bytes = options.shared ? round_up(head_bytes(geometry), geometry.alignment()) : 0;
  const int64_t bytes = table.total_bytes + header_bytes;
  const bool reserved = options.shared && options.huge_pages && free_hugetlb_bytes() >= bytes;
  if (!reserved) {  // MemAvailable does not include reserved huge pages
    require_memory(options, bytes,
                   "host pool of " + std::to_string(geometry.slots) + " slots of " +
                       std::to_string(geometry.slot_bytes) + " bytes");
  }
  PoolMapping mapping = options.shared ? PoolMapping::memfd(bytes, options.huge_pages)
                                       : PoolMapping::anonymous(bytes, options.huge_pages);
  if (options.shared) mapping.populate(0, round_up(head_bytes(geometry), kIoAlignBytes));
  std::shared_ptr<HostPool> pool(new HostPool(geometry, std::move(mapping), false, options));
  {
    const std::lock_guard lock(registry_mutex);
    registry()[pool->header_->token] = pool;
  }
  try {
    pool->bring_up_thread_ = std::thread(&HostPool::bring_up, pool.get());
  } catch (const std::system_error& error) {
    throw CapacityError(std::string("host pool: no thread to bring its memory up: ") + error.what());
  }
  pthread_setname_np(pool->bring_up_thread_.native_handle(), "flexkv-bringup");
  return pool;
}

std::shared_ptr<HostPool> HostPool::attach(const PoolAddress& address) {
  address.geometry.check();
  {
    const std::lock_guard lock(registry_mutex);
    const auto found = registry().find(address.token);
    if (found != registry().end() && address.pid == getpid()) {
      if (auto pool = found->second.lock(); pool && !pool->closed()) return pool;
    }
  }
  // The watch begins before the token is compared. If the token then matches, the watched process is the one
  // that made the pool, and not a later process with the same pid.
  ProcessWatch creator(address.pid);
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const std::string what = "shared pool at " + path;
  // Checks what the descriptor refers to before opening it. Its number may have been reused, and opening a
  // FIFO could block, while opening a device could have side effects.
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
  const PoolGeometry found{header->slot_bytes, header->slots, header->extent_bytes};
  if (found != address.geometry || header->slots_offset < head_bytes(found) ||
      header->slots_offset + ExtentTable(found).total_bytes > address.file_bytes) {
    throw GeometryError(
        what + ": it has " + std::to_string(found.slots) + " slots of " + std::to_string(found.slot_bytes) +
        " bytes in extents of " + std::to_string(found.extent_bytes) + ", expected " +
        std::to_string(address.geometry.slots) + " of " + std::to_string(address.geometry.slot_bytes) +
        " in " + std::to_string(address.geometry.extent_bytes));
  }
  std::shared_ptr<HostPool> pool(
      new HostPool(address.geometry, std::move(mapping), true, {.shared = true, .huge_pages = false}));
  pool->creator_ = std::move(creator);
  return pool;
}

HostPool::HostPool(const PoolGeometry& geometry, PoolMapping mapping, bool attached,
                   const PoolOptions& options)
    : table_(geometry),
      pieces_(table_),
      mapping_(std::move(mapping)),
      attached_(attached),
      home_(getpid()),
      huge_pages_(options.huge_pages),
      numa_node_(options.numa_node),
      memory_(options.memory),
      registered_(new std::atomic<bool>[static_cast<size_t>(pieces_.count)]()) {
  if (!shared()) {
    own_header_ = std::make_unique<PoolHeader>();
    own_arrivals_ = std::make_unique<SlotArrivals::Word[]>(static_cast<size_t>(geometry.slots));
    header_ = own_header_.get();
    arrivals_ = own_arrivals_.get();
  } else if (!attached_) {
    header_ = new (mapping_.base()) PoolHeader();
    arrivals_ =
        new (mapping_.base() + kIoAlignBytes) SlotArrivals::Word[static_cast<size_t>(geometry.slots)]();
  } else {
    header_ = reinterpret_cast<PoolHeader*>(mapping_.base());
    arrivals_ = reinterpret_cast<SlotArrivals::Word*>(mapping_.base() + kIoAlignBytes);
  }
  if (!attached_) {
    header_->token = random_token();
    header_->slot_bytes = geometry.slot_bytes;
    header_->slots = geometry.slots;
    header_->extent_bytes = geometry.extent_bytes;
    header_->slots_offset = shared() ? round_up(head_bytes(geometry), geometry.alignment()) : 0;
    header_->magic = kPoolMagic;
  }
  slots_base_ = mapping_.base() + header_->slots_offset;
  for (int64_t i = 0; i < table_.count; ++i) {
    reports_.push_back(
        {.index = i, .bytes = table_.bytes_of(i), .pages_kind = attached_ ? "attached" : "pending"});
  }
}

HostPool::~HostPool() {
  close();
  if (forked()) {
    // Leaks the thread objects. The threads do not exist in this process, so they cannot be joined.
    new std::thread(std::move(bring_up_thread_));
    new std::thread(std::move(pin_thread_));
    return;
  }
  unregister_all();
}

bool HostPool::forked() const { return getpid() != home_; }

void HostPool::require_home(const char* what) const {
  if (!forked()) return;
  throw ClosedError(std::string(what) + ": the host pool stayed in process " + std::to_string(home_));
}

int64_t HostPool::ready_slots() const { return header_->ready_slots.load(std::memory_order_acquire); }

bool HostPool::creator_gone() const {
  return attached_ && (header_->magic != kPoolMagic || creator_.ended());
}

bool HostPool::settled() const {
  return header_->finished.load(std::memory_order_acquire) != 0 || ready_slots() == table_.geometry.slots ||
         creator_gone();
}

bool HostPool::wait_ready(int64_t slots, double deadline_s) const {
  if (slots > table_.geometry.slots) {
    throw BlockRangeError("wait_ready(" + std::to_string(slots) + "): the pool has " +
                          std::to_string(table_.geometry.slots) + " slots");
  }
  const auto deadline = deadline_in(deadline_s);
  for (;;) {
    const uint32_t seen = header_->generation.load(std::memory_order_acquire);
    const bool over = settled();
    if (ready_slots() >= slots) return true;
    const double left_s = seconds_until(deadline);
    if (left_s <= 0 || over || closed()) return false;
    await_change(*header_, seen, attached_ ? std::min(left_s, kCreatorLookS) : left_s);
  }
}

std::string HostPool::stopped_reason() const {
  require_home("stopped_reason");
  if (ready_slots() == table_.geometry.slots) return {};
  if (creator_gone()) return "the process that made the pool has ended or closed it";
  const std::lock_guard lock(mutex_);
  return stopped_reason_;
}

std::string HostPool::registration_error() const {
  require_home("registration_error");
  const std::lock_guard lock(mutex_);
  return registration_error_;
}

std::byte* HostPool::slot(int64_t slot) const {
  if (closed()) throw ClosedError("slot " + std::to_string(slot) + ": the host pool was closed");
  require_home("slot");
  const int64_t ready = ready_slots();
  if (slot < 0 || slot >= ready) {
    throw BlockRangeError("slot " + std::to_string(slot) + ": allowed are [0, " + std::to_string(ready) +
                          ") (ready), of " + std::to_string(table_.geometry.slots));
  }
  return slot_address(slot);
}

std::vector<ExtentReport> HostPool::report() const {
  require_home("report");
  const std::lock_guard lock(mutex_);
  return reports_;
}

PoolAddress HostPool::address() const {
  if (!shared())
    throw ContractError("a private host pool cannot be mapped by another process: make it shared");
  return {home_, mapping_.fd(), header_->token, mapping_.bytes(), table_.geometry};
}

void HostPool::close() {
  closed_.store(true, std::memory_order_release);
  if (forked()) return;
  if (!attached_) header_->magic = 0;
  stopping_ = true;
  announce(*header_);
  std::thread threads[2];
  {
    const std::lock_guard lock(mutex_);
    threads[0].swap(bring_up_thread_);
    threads[1].swap(pin_thread_);
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  const std::lock_guard lock(registry_mutex);
  const auto found = registry().find(header_->token);
  if (!attached_ && found != registry().end()) registry().erase(found);
}

}  // namespace flexkv
