// Tests host pools with a device that registers extents or refuses to register them.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "thread_watch.h"
#include "transfer/deadline.h"
#include "transfer/host_pool.h"
#include "transfer_world.h"

using namespace flexkv;

namespace {

constexpr int64_t kSlotBytes = int64_t{1} << 20;
constexpr int64_t kExtentBytes = int64_t{4} << 20;

// Refuses the calls of add() whose numbers, counted from 0, are in `refused`.
class FakeRegistrar : public Registrar {
 public:
  explicit FakeRegistrar(std::set<int> refused) : refused_(std::move(refused)) {}
  std::string add(void* base, int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const int number = added_++;
    if (refused_.count(number) != 0) return "out of memory";
    held_[static_cast<std::byte*>(base)] = bytes;
    return {};
  }
  void remove(void* base) override {
    const std::lock_guard lock(mutex_);
    CHECK_MESSAGE(held_.erase(static_cast<std::byte*>(base)) == 1, "removed what was not registered");
  }
  std::map<std::byte*, int64_t> held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  int tries() const {
    const std::lock_guard lock(mutex_);
    return added_;
  }

 private:
  mutable std::mutex mutex_;
  const std::set<int> refused_;
  std::map<std::byte*, int64_t> held_;
  int added_ = 0;
};

// Throws at every call of add().
class ThrowingRegistrar : public Registrar {
 public:
  std::string add(void*, int64_t) override { throw CapacityError("the driver is gone"); }
  void remove(void*) override { FAIL("removed what was not registered"); }
};

std::shared_ptr<HostPool> ready_pool() {
  auto pool = HostPool::create({kSlotBytes, 16, kExtentBytes}, {});
  REQUIRE(pool->wait_ready(16, kGenerousS));
  return pool;
}

}  // namespace

TEST_CASE("a refused extent is named and works; the others are registered, and let go at the end") {
  // The second and the third extent are refused twice each: at the first try and at the only retry.
  const auto registrar = std::make_shared<FakeRegistrar>(std::set<int>{1, 2, 4, 5});
  auto pool = ready_pool();
  CHECK(pool->pinned_slots() == 0);  // pin() was not called: a process that does not copy pins nothing
  CHECK(registrar->held().empty());
  pool->pin(registrar, {.tries = 1, .first_pause_s = 0.001});
  REQUIRE(comes_true([&] { return !pool->registration_error().empty(); }));
  CHECK(pool->pinned_slots() == 16);
  std::vector<bool> registered;
  for (const ExtentReport& extent : pool->report()) registered.push_back(extent.registered);
  CHECK(registered == std::vector<bool>{true, false, false, true});
  CHECK(pool->registered(0));
  CHECK_FALSE(pool->registered(4));
  CHECK(pool->registration_error() == "slots 4 to 7 and others (2 tries): out of memory");
  *pool->slot(5) = std::byte{7};
  pool->pin(std::make_shared<FakeRegistrar>(std::set<int>{0}));  // a second call changes nothing
  CHECK(registrar->held().size() == 2);
  pool.reset();
  CHECK(registrar->held().empty());
}

TEST_CASE("memory that is refused for a while is registered in the end") {
  const auto registrar = std::make_shared<FakeRegistrar>(std::set<int>{0, 2, 4});
  auto pool = ready_pool();
  pool->pin(registrar, {.tries = 3, .first_pause_s = 0.001});
  REQUIRE(comes_true([&] { return registrar->tries() == 7; }));
  REQUIRE(comes_true([&] { return pool->registered(0); }));
  for (int64_t slot = 0; slot < 16; ++slot) CHECK(pool->registered(slot));
  CHECK(pool->registration_error().empty());
  // The pause before a retry does not delay a close.
  const auto refusing = std::make_shared<FakeRegistrar>(std::set<int>{0});
  auto closed = ready_pool();
  closed->pin(refusing, {.tries = 1, .first_pause_s = 1e6});
  REQUIRE(comes_true([&] { return closed->pinned_slots() == 16; }));
  closed.reset();
  CHECK(refusing->tries() == 4);
  CHECK(refusing->held().empty());
}

TEST_CASE("memory is registered in pieces of bounded size that split no slot, and let go piece by piece") {
  const auto registrar = std::make_shared<FakeRegistrar>(std::set<int>{});
  constexpr int64_t kMib = int64_t{1} << 20;
  constexpr int64_t kOdd = 7 * kMib + 4096;
  auto pool = HostPool::create({kOdd, 25, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(25, kGenerousS));
  pool->pin(registrar);
  REQUIRE(comes_true([&] { return pool->pinned_slots() == 25; }));
  std::vector<int64_t> sizes;
  for (const auto& [base, bytes] : registrar->held()) {
    sizes.push_back(bytes);
    CHECK((base - pool->slot_address(0)) % kOdd == 0);
  }
  CHECK(sizes == std::vector<int64_t>{18 * kOdd, 7 * kOdd});
  CHECK(pool->report().front().registered);
  pool.reset();
  CHECK(registrar->held().empty());
}

TEST_CASE("pieces of every geometry cover each slot once, within one extent, and are bounded") {
  for (const int64_t slot_bytes :
       {int64_t{4096}, int64_t{3} << 20, (int64_t{64} << 20) + 4096, int64_t{1} << 29}) {
    for (const int64_t extent_bytes : {slot_bytes, 5 * slot_bytes, kMaxExtentBytes}) {
      if (extent_bytes > kMaxExtentBytes) continue;
      for (const int64_t slots : {1, 2, 43, 1000}) {
        const ExtentTable table(PoolGeometry{slot_bytes, slots, extent_bytes});
        const PinPieces pieces(table);
        int64_t next = 0;
        for (int64_t piece = 0; piece < pieces.count; ++piece) {
          CHECK(pieces.first_slot(piece) == next);
          REQUIRE(pieces.slots_of(piece) > 0);
          CHECK(pieces.bytes_of(piece) <= std::max(kPinPieceBytes, slot_bytes));
          for (int64_t slot = next; slot < next + pieces.slots_of(piece); ++slot) {
            if (pieces.piece_of(slot) != piece || table.extent_of(slot) != pieces.extent_of(piece))
              FAIL(slot);
          }
          next += pieces.slots_of(piece);
        }
        CHECK(next == slots);
      }
    }
  }
}

TEST_CASE("bring-up stops, with a reason, before it takes the last free memory") {
  // Simulates a machine on which other programs use up the memory. At the fourth check too little memory is
  // left.
  auto looks = std::make_shared<std::atomic<int>>(0);
  PoolOptions options;
  options.memory = [looks]() -> MemoryLimit {
    return {++*looks <= 3 ? int64_t{1} << 40 : kHeadroomBytes, "a full machine"};
  };
  auto pool = HostPool::create({kSlotBytes, 256, kMaxExtentBytes}, options);  // this is the first check
  CHECK_FALSE(pool->wait_ready(256, kGenerousS));
  CHECK(pool->ready_slots() == 128);  // each of the next two checks allowed 64 MiB
  CHECK(pool->stopped_reason().find("left by a full machine") != std::string::npos);
  CHECK_NOTHROW(pool->slot(127));
  CHECK_THROWS_AS(pool->slot(128), BlockRangeError);

  options.memory = []() -> MemoryLimit { return {kHeadroomBytes + 16 * kSlotBytes, "a small machine"}; };
  CHECK_THROWS_AS(HostPool::create({kSlotBytes, 17, kMaxExtentBytes}, options), CapacityError);
}

TEST_CASE("memory is asked for on a node, and where it lies is told") {
  PoolOptions options;
  options.numa_node = 0;
  auto pool = HostPool::create({kSlotBytes, 4, kExtentBytes}, options);
  if (!pool->wait_ready(4, kGenerousS)) {
    // A kernel without NUMA support, or a container that forbids the call, returns an error.
    CHECK(pool->stopped_reason().find("mbind to node 0") != std::string::npos);
    return;
  }
  for (const ExtentReport& extent : pool->report())
    CHECK((extent.numa_node == 0 || extent.numa_node == kAnyNode));
  options.numa_node = kMostNodes;
  CHECK_THROWS_AS(HostPool::create({kSlotBytes, 4, kExtentBytes}, options), ConfigError);
}

TEST_CASE("pool: what its pin thread throws is told, and the process goes on") {
  const auto pool = HostPool::create({kSlotBytes, 4, kExtentBytes}, {});
  pool->pin(std::make_shared<ThrowingRegistrar>());
  CHECK(comes_true([&] { return pool->registration_error() == "the driver is gone"; }));
  CHECK_FALSE(pool->registered(0));
}
