// Tests the disk lane with more pages than it queues at once. In one test a disk is slow: its dispatcher
// finds the queue full again and again, goes to sleep, and must be woken each time. In the other test a disk
// hangs.
#include <doctest/doctest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "page_world.h"
#include "storage/disk_lane.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {
namespace {

constexpr int32_t kPages = 64;
constexpr int32_t kPagesOfOp = 4;
constexpr int32_t kRounds = 12;
constexpr int64_t kBacklogPageBytes = int64_t{1} << 20;

// A queue whose take() is slow, so that the dispatcher has time to push pages while the I/O thread begins
// other pages.
class DawdlingQueue final : public IoQueue {
 public:
  explicit DawdlingQueue(std::unique_ptr<IoQueue> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override { inner_->submit(request); }
  void wait(std::vector<IoDone>& done) override { inner_->wait(done); }
  void take(std::vector<IoDone>& done) override {
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (calls_++ % 4)));
    inner_->take(done);
  }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  int64_t calls_ = 0;
};

// The test with a hung disk submits kHeldOps writes of kHeldPages pages each. That is more than the 65,536
// pages that all disks together queue.
constexpr int32_t kHeldPages = 512;
constexpr int32_t kHeldOps = 130;
// Unit: seconds. How long the test waits for a write to the disk that does not hang. If the lane queued all
// pages of the hung disk, this write would finish within a few milliseconds.
constexpr double kHeldS = 1.0;

struct Hold {
  std::mutex mutex;
  std::condition_variable changed;
  bool holds = true;

  void release() {
    const std::lock_guard lock(mutex);
    holds = false;
    changed.notify_all();
  }
};

// A queue that completes requests without any I/O. Requests of disk 0 complete only after the hold is
// released.
class HeldQueue final : public IoQueue {
 public:
  HeldQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<Hold> hold, int32_t disk)
      : inner_(std::move(inner)), hold_(std::move(hold)), is_held_(disk == 0) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override { requests_.push_back({request.cookie, request.bytes}); }
  void wait(std::vector<IoDone>& done) override {
    std::unique_lock lock(hold_->mutex);
    hold_->changed.wait(lock, [&] { return woken_ || (may_end() && !requests_.empty()); });
    woken_ = false;
    end(done);
  }
  void take(std::vector<IoDone>& done) override {
    const std::lock_guard lock(hold_->mutex);
    end(done);
  }
  void wake() override {
    const std::lock_guard lock(hold_->mutex);
    woken_ = true;
    hold_->changed.notify_all();
  }

 private:
  bool may_end() const { return !is_held_ || !hold_->holds; }
  void end(std::vector<IoDone>& done) {
    if (!may_end()) return;
    done.insert(done.end(), requests_.begin(), requests_.end());
    requests_.clear();
  }

  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<Hold> hold_;
  bool is_held_;
  bool woken_ = false;
  std::vector<IoDone> requests_;
};

}  // namespace

TEST_CASE("while a disk hangs, the lane queues a limited number of pages") {
  const auto codec = page_codec(1, 512);
  const auto pool = HostPool::create({codec->image_bytes(), kHeldPages, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(kHeldPages, kWaitS));
  std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
  for (const uint64_t disk : {0, 1}) {
    const std::string path = "slab-held" + std::to_string(disk);
    slabs.push_back({std::make_shared<SlabFile>(path, make_slab(path, *codec, kHeldPages, disk + 1), -1)});
  }
  std::vector<DiskGroup> groups;
  groups.push_back({codec, {}, pool});
  const auto hold = std::make_shared<Hold>();
  const WrapQueue wrap = [hold](std::unique_ptr<IoQueue> queue, int32_t disk) {
    return std::make_unique<HeldQueue>(std::move(queue), hold, disk);
  };
  const auto lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs),
                                               DiskOptions{IoBackend::kThreads, 4, 0.0}, wrap);
  TransferEngine engine(std::make_shared<HostMover>(), EngineOptions{},
                        std::vector<std::shared_ptr<Lane>>{lane});
  // Submits a write of `pages` pages to one of the disks, and returns its ticket.
  auto write = [&, next_op = int64_t{1}](int32_t disk, int32_t pages) mutable {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = OpKind::kDiskWrite;
    op.priority = Priority::kStore;
    for (int32_t i = 0; i < pages; ++i) {
      op.slots.push_back(i);
      op.places.push_back(2 * i + disk);
      add_tag(op, i);
    }
    return submit_op(engine, std::move(op));
  };
  const int64_t control = write(1, 1);
  CHECK(engine.wait(control, kWaitS));  // the disk that does not hang works
  std::vector<int64_t> tickets;
  for (int32_t i = 0; i < kHeldOps; ++i) tickets.push_back(write(0, kHeldPages));
  tickets.push_back(write(1, 1));
  CHECK_FALSE(engine.wait(tickets.back(), kHeldS));  // the lane did not take the last write
  hold->release();
  for (const int64_t ticket : tickets) REQUIRE(engine.wait(ticket, kWaitS));
  for (const OpResult& result : engine.poll(tickets.size() + 1)) CHECK(result.status == Status::kOk);
  CHECK(engine.close(kWaitS));
  for (const char* path : {"slab-held0", "slab-held1"}) std::remove(path);
}

TEST_CASE("a disk's dispatcher is woken whenever a full queue has room again") {
  const auto codec = page_codec(1, kBacklogPageBytes);
  const auto pool = HostPool::create({codec->image_bytes(), kPages, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(kPages, kWaitS));
  const std::string path = "slab-backlog";
  const SlabShape shape = make_slab(path, *codec, kPages, 1);
  std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
  slabs.push_back({std::make_shared<SlabFile>(path, shape, -1)});
  std::vector<DiskGroup> groups;
  groups.push_back({codec, {}, pool});
  const WrapQueue wrap = [](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<DawdlingQueue>(std::move(queue));
  };
  const auto lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs),
                                               DiskOptions{IoBackend::kAuto, 4, 30.0}, wrap);
  TransferEngine engine(std::make_shared<HostMover>(), EngineOptions{},
                        std::vector<std::shared_ptr<Lane>>{lane});
  int64_t next_op = 1;
  for (int32_t round = 0; round < kRounds; ++round) {
    std::vector<int64_t> tickets;
    for (int32_t first = 0; first < kPages; first += kPagesOfOp) {
      OpSpec op;
      op.op_id = next_op++;
      op.kind = OpKind::kDiskWrite;
      op.priority = Priority::kStore;
      for (int32_t i = first; i < first + kPagesOfOp; ++i) {
        op.slots.push_back(i);
        op.places.push_back(i);
        add_tag(op, i);
      }
      tickets.push_back(submit_op(engine, std::move(op)));
    }
    for (const int64_t ticket : tickets) REQUIRE(engine.wait(ticket, kWaitS));
    for (const OpResult& result : engine.poll(tickets.size())) CHECK(result.status == Status::kOk);
  }
  CHECK(engine.close(kWaitS));
  std::remove(path.c_str());
}

}  // namespace flexkv
