// Who goes first on one disk: reads before writes, and a write that waits for many reads all the same.
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
#include "transfer/deadline.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {
namespace {

constexpr int32_t kReads = 40;
constexpr int32_t kWrites = 4;
constexpr int32_t kPlaces = 64;
constexpr int64_t kPageBytes = 4096;
constexpr double kWaitS = 60;
// Of disk_io.cpp: so many reads go before a write that waits.
constexpr size_t kReadsBeforeWrite = 16;

// Holds the first I/O back until it is let go, and writes down what each of them is.
struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  std::string order;  // 'r' or 'w'

  void note(bool write) {
    std::unique_lock lock(mutex);
    order += write ? 'w' : 'r';
    CHECK(changed.wait_until(lock, deadline_in(kWaitS), [this] { return open; }));
  }
  void let_go() {
    {
      const std::lock_guard lock(mutex);
      open = true;
    }
    changed.notify_all();
  }
};

class NotingQueue final : public IoQueue {
 public:
  NotingQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<Turns> turns)
      : inner_(std::move(inner)), turns_(std::move(turns)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    turns_->note(request.write);
    inner_->submit(request);
  }
  void wait(std::vector<IoDone>& done) override { inner_->wait(done); }
  void take(std::vector<IoDone>& done) override { inner_->take(done); }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<Turns> turns_;
};

// What is wrong with an order of turns that was taken while all of them waited; empty if nothing is.
std::string wrong_turn(const std::string& order) {
  size_t reads_left = kReads;
  size_t writes_left = kWrites;
  size_t in_row = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] == 'w') {
      if (reads_left > 0 && in_row < kReadsBeforeWrite) return "a write went before reads that waited";
      --writes_left;
      in_row = 0;
    } else {
      if (writes_left > 0 && in_row == kReadsBeforeWrite) return "a write was put off for too many reads";
      --reads_left;
      ++in_row;
    }
  }
  return reads_left + writes_left == 0 ? "" : "an I/O is missing";
}

}  // namespace

TEST_CASE("reads go before writes, and a write that waited for many of them gets its turn") {
  const auto codec = page_codec(1, kPageBytes);
  const auto pool = HostPool::create({codec->image_bytes(), kPlaces, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(kPlaces, kWaitS));
  const std::string path = "slab-turns";
  const SlabShape shape = make_slab(path, *codec, kPlaces, 1);
  std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
  slabs.push_back({std::make_shared<SlabFile>(path, shape, -1)});
  std::vector<DiskGroup> groups;
  groups.push_back({codec, {}, pool});
  const auto turns = std::make_shared<Turns>();
  const WrapQueue wrap = [turns](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<NotingQueue>(std::move(queue), turns);
  };
  // One at a time, so that the order is the order of the choices.
  const auto lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs),
                                               DiskOptions{IoBackend::kAuto, 1, 0}, wrap);
  TransferEngine engine(std::make_shared<HostMover>(), EngineOptions{},
                        std::vector<std::shared_ptr<Lane>>{lane});
  int64_t next_op = 1;
  const auto submit = [&](OpKind kind, int32_t first, int32_t pages) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = kind;
    op.priority = kind == OpKind::kDiskRead ? Priority::kLoad : Priority::kStore;
    for (int32_t i = first; i < first + pages; ++i) {
      op.slots.push_back(i);
      op.places.push_back(i);
      add_tag(op, i);
    }
    return submit_op(engine, std::move(op));
  };
  const auto until_queued = [&](size_t pages) {
    const auto ends = deadline_in(kWaitS);
    while (lane->states()[0].queued != pages) {
      REQUIRE(Clock::now() < ends);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  // The first is under way while the others come: writes before reads.
  std::vector<int64_t> tickets{submit(OpKind::kDiskWrite, 0, 1)};
  const auto begun = [&] {
    const std::lock_guard lock(turns->mutex);
    return !turns->order.empty();
  };
  const auto ends = deadline_in(kWaitS);
  while (!begun()) REQUIRE(Clock::now() < ends);
  tickets.push_back(submit(OpKind::kDiskWrite, 1, kWrites));
  until_queued(kWrites);
  tickets.push_back(submit(OpKind::kDiskRead, kWrites + 1, kReads));
  until_queued(kWrites + kReads);
  turns->let_go();
  for (const int64_t ticket : tickets) REQUIRE(engine.wait(ticket, kWaitS));
  REQUIRE(turns->order.size() == 1 + kWrites + kReads);
  CHECK(wrong_turn(turns->order.substr(1)) == "");
  CHECK(engine.close(kWaitS));
  std::remove(path.c_str());
}

TEST_CASE("orders that starve one or the other are told") {
  const std::string reads(kReads, 'r');
  const std::string writes(kWrites, 'w');
  CHECK(wrong_turn(reads + writes) == "a write was put off for too many reads");
  CHECK(wrong_turn(writes + reads) == "a write went before reads that waited");
  CHECK(wrong_turn(reads.substr(1) + writes) != "");
}

}  // namespace flexkv
