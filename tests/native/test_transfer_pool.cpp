// Host pools with a device that takes extents, or does not.
#include <doctest/doctest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "transfer/deadline.h"
#include "transfer/host_pool.h"

using namespace flexkv;

namespace {

constexpr double kGenerousS = 60;
constexpr int64_t kSlotBytes = int64_t{1} << 20;
constexpr int64_t kExtentBytes = int64_t{4} << 20;

class FakeRegistrar : public Registrar {
 public:
  explicit FakeRegistrar(std::set<int> refused) : refused_(std::move(refused)) {}
  std::string add(void* base, int64_t) override {
    const std::lock_guard lock(mutex_);
    const int number = added_++;
    if (refused_.count(number) != 0) return "out of memory";
    held_.insert(base);
    return {};
  }
  void remove(void* base) override {
    const std::lock_guard lock(mutex_);
    CHECK_MESSAGE(held_.erase(base) == 1, "removed what was not registered");
  }
  size_t held() const {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }

 private:
  mutable std::mutex mutex_;
  const std::set<int> refused_;
  std::set<void*> held_;
  int added_ = 0;
};

}  // namespace

TEST_CASE("a refused extent is named and works; the others are registered, and let go at the end") {
  const auto registrar = std::make_shared<FakeRegistrar>(std::set<int>{1, 2});
  auto pool = HostPool::create({kSlotBytes, 16, kExtentBytes}, {});
  REQUIRE(pool->wait_ready(16, kGenerousS));
  CHECK(pool->pinned_slots() == 0);  // nobody asked: a process that does not copy pins nothing
  CHECK(registrar->held() == 0);
  pool->pin(registrar);
  const auto deadline = deadline_in(kGenerousS);
  while (pool->pinned_slots() < 16 && seconds_until(deadline) > 0) std::this_thread::yield();
  REQUIRE(pool->pinned_slots() == 16);
  std::vector<bool> registered;
  for (const ExtentReport& extent : pool->report()) registered.push_back(extent.registered);
  CHECK(registered == std::vector<bool>{true, false, false, true});
  CHECK(pool->registered(0));
  CHECK_FALSE(pool->registered(4));
  CHECK(pool->registration_error() == "extent 1: out of memory");
  *pool->slot(5) = std::byte{7};
  pool->pin(std::make_shared<FakeRegistrar>(std::set<int>{0}));  // a second time changes nothing
  CHECK(registrar->held() == 2);
  pool.reset();
  CHECK(registrar->held() == 0);
}

TEST_CASE("bring-up stops, with a reason, before it takes the last free memory") {
  // A machine that fills up from elsewhere: after the third look too little is left.
  auto looks = std::make_shared<std::atomic<int>>(0);
  PoolOptions options;
  options.memory = [looks]() -> MemoryLimit {
    return {++*looks <= 3 ? int64_t{1} << 40 : kHeadroomBytes, "a full machine"};
  };
  auto pool = HostPool::create({kSlotBytes, 256, kMaxExtentBytes}, options);  // creation is the first look
  CHECK_FALSE(pool->wait_ready(256, kGenerousS));
  CHECK(pool->ready_slots() == 128);  // 64 MiB a look
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
    // A kernel without NUMA, or a container that forbids the call, says so.
    CHECK(pool->stopped_reason().find("mbind to node 0") != std::string::npos);
    return;
  }
  for (const ExtentReport& extent : pool->report())
    CHECK((extent.numa_node == 0 || extent.numa_node == kAnyNode));
  options.numa_node = kMostNodes;
  CHECK_THROWS_AS(HostPool::create({kSlotBytes, 4, kExtentBytes}, options), ConfigError);
}
