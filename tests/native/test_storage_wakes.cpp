// Tests that the disk's thread begins a page at once even if the page was queued just before the thread
// waits. Another test checks when the watchdog reports a disk as hung.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "one_disk.h"
#include "testing/faulty_queue.h"

namespace flexkv {
namespace {

// A queue that calls a function before each wait.
class WatchedQueue final : public IoQueue {
 public:
  WatchedQueue(std::unique_ptr<IoQueue> inner, std::function<void()> waiting)
      : inner_(std::move(inner)), waiting_(std::move(waiting)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override { inner_->submit(request); }
  void wait(std::vector<IoDone>& done) override {
    waiting_();
    inner_->wait(done);
  }
  void take(std::vector<IoDone>& done) override { inner_->take(done); }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::function<void()> waiting_;
};

// Waits until the condition is true. Returns false if it is not true within kWaitS.
bool wait_until(const std::function<bool()>& condition) {
  const auto deadline = deadline_in(kWaitS);
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    usleep(1000);
  }
  return true;
}

// Releases stalled I/Os at the end of a test, even if the test fails, so that the disk can stop.
struct Release {
  std::shared_ptr<IoFaults> faults;
  ~Release() { faults->release(); }
};

IoFaultRule hang_once() {
  IoFaultRule hang;
  hang.action = IoFaultAction::kStall;
  hang.times = 1;
  return hang;
}

}  // namespace

TEST_CASE("a page that is queued while the disk's thread begins another one does not wait for that one") {
  const auto faults = std::make_shared<IoFaults>(std::vector{hang_once()});
  const WrapQueue wrap = [&](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<FaultyQueue>(std::move(queue), faults, 0);
  };
  OneDisk* world = nullptr;
  std::atomic<int64_t> second{0};
  // The disk's thread calls this after it has chosen pages and before it waits.
  const auto on_change = [&] {
    if (OneDisk* to = std::exchange(world, nullptr)) second = to->push(OpKind::kDiskWrite, 1, 1);
  };
  OneDisk disk(4, DiskOptions{IoBackend::kThreads, 4, 0}, wrap, on_change);
  world = &disk;
  const Release release{faults};
  const int64_t first = disk.push(OpKind::kDiskWrite, 0, 1);
  disk.start();
  REQUIRE(wait_until([&] { return second != 0; }));
  CHECK(faults->wait_stalled(1, kWaitS));
  CHECK(disk.scheduler->wait(second, kWaitS));
  CHECK(!disk.scheduler->wait(first, 0));
  faults->release();
  CHECK(disk.scheduler->wait(first, kWaitS));
}

TEST_CASE("a disk is hung if the same I/O is its oldest at every look, and not if another one is") {
  const auto faults = std::make_shared<IoFaults>(std::vector<IoFaultRule>{});
  std::atomic<int64_t> waits{0};
  const WrapQueue wrap = [&](std::unique_ptr<IoQueue> queue, int32_t) {
    auto faulty = std::make_unique<FaultyQueue>(std::move(queue), faults, 0);
    return std::make_unique<WatchedQueue>(std::move(faulty), [&] { ++waits; });
  };
  OneDisk world(4, DiskOptions{IoBackend::kThreads, 4, 0}, wrap);
  const Release release{faults};
  world.start();
  constexpr int32_t kLooks = 3;
  CHECK(!world.disk->look(1));  // no I/O is in flight
  CHECK(!world.disk->look(1));
  for (int32_t place = 0; place < 3; ++place) {
    faults->add(hang_once());
    const int64_t before = waits;
    const int64_t ticket = world.push(OpKind::kDiskWrite, place, 1);
    // The disk records its oldest I/O before it waits.
    REQUIRE(wait_until([&] { return waits != before; }));
    // If the oldest I/O has changed, the first look only records it.
    const int32_t looks = place < 2 ? kLooks : kLooks + 1;
    for (int32_t look = 0; look < looks; ++look) CHECK(world.disk->look(kLooks) == (look == kLooks));
    faults->release();
    REQUIRE(world.scheduler->wait(ticket, kWaitS));
  }
}

}  // namespace flexkv
