// Host pools with a device that takes extents, or does not.
#include <doctest/doctest.h>

#include <mutex>
#include <set>

#include "transfer/host_pool.h"

using namespace flexkv;

namespace {

constexpr double kGenerousS = 60;
constexpr int64_t kSlotBytes = int64_t{1} << 20;
constexpr int64_t kExtentBytes = int64_t{4} << 20;

class FakeRegistrar : public Registrar {
 public:
  explicit FakeRegistrar(std::set<int> refused) : refused_(std::move(refused)) {}
  bool active() const override { return true; }
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
  auto pool = HostPool::create({kSlotBytes, 16, kExtentBytes}, false, true, registrar);
  REQUIRE(pool->wait_ready(16, kGenerousS));
  std::vector<bool> registered;
  for (const ExtentReport& extent : pool->report()) registered.push_back(extent.registered);
  CHECK(registered == std::vector<bool>{true, false, false, true});
  CHECK(pool->registration_error() == "extent 1: out of memory");
  *pool->slot(5) = std::byte{7};
  CHECK(registrar->held() == 2);
  pool.reset();
  CHECK(registrar->held() == 0);
}
