// Which I/O goes first on one disk: reads go before writes, but a write that has waited for many reads goes
// too.
#include <doctest/doctest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "page_world.h"
#include "storage/disk.h"
#include "transfer/scheduler.h"

namespace flexkv {
namespace {

constexpr int32_t kReads = 40;
constexpr int32_t kWrites = 4;
constexpr int32_t kTurnPlaces = 64;
constexpr int64_t kTurnPageBytes = 4096;
// As in disk_io.cpp: how many reads go before a write that waits.
constexpr size_t kReadsBeforeWrite = 16;

// Records whether each I/O reads or writes, in the order in which they begin.
class NotingQueue final : public IoQueue {
 public:
  NotingQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<std::string> order)
      : inner_(std::move(inner)), order_(std::move(order)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    *order_ += request.write ? 'w' : 'r';
    inner_->submit(request);
  }
  void wait(std::vector<IoDone>& done) override { inner_->wait(done); }
  void take(std::vector<IoDone>& done) override { inner_->take(done); }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<std::string> order_;  // 'r' or 'w'; only the disk's thread uses it while it runs
};

// Takes nothing by itself: the test gives its pages to the disk.
class IdleLane final : public Lane {
 public:
  const char* name() const override { return "idle"; }
  KindSet kinds() const override { return kind_bit(OpKind::kDiskRead) | kind_bit(OpKind::kDiskWrite); }
  int32_t concurrency() const override { return 1; }
  void start(std::shared_ptr<WorkSource>, int32_t) override {}
  void join() override {}
  void abandon() override {}
};

// What is wrong with the order of turns if all of them waited from the start; empty if nothing is.
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
  const auto codec = page_codec(1, kTurnPageBytes);
  const auto pool = HostPool::create({codec->image_bytes(), kTurnPlaces, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(kTurnPlaces, kWaitS));
  const std::string path = "slab-turns";
  const SlabShape shape = make_slab(path, *codec, kTurnPlaces, 1);
  std::vector<DiskGroup> groups;
  groups.push_back({codec, {}, pool});
  const auto order = std::make_shared<std::string>();
  const WrapQueue wrap = [order](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<NotingQueue>(std::move(queue), order);
  };
  // One I/O at a time, so that their order is the order of the choices.
  Disk disk(0, {std::make_shared<SlabFile>(path, shape, -1)},
            std::make_shared<const std::vector<DiskGroup>>(std::move(groups)),
            DiskOptions{IoBackend::kAuto, 1, 0}, wrap, [] {});
  const auto scheduler = std::make_shared<Scheduler>(kTurnPlaces, 0);
  scheduler->add_lane(std::make_shared<IdleLane>());
  int64_t next_op = 1;
  const auto push = [&](OpKind kind, int32_t first, int32_t pages) {
    GraphSpec graph;
    OpSpec& op = graph.ops.emplace_back();
    op.op_id = next_op++;
    op.kind = kind;
    op.priority = kind == OpKind::kDiskRead ? Priority::kLoad : Priority::kStore;
    for (int32_t i = first; i < first + pages; ++i) {
      op.slots.push_back(i);
      op.places.push_back(i);
      add_tag(op, i);
    }
    const auto ticket = scheduler->submit(std::move(graph), {nullptr}, {{codec->image_bytes(), 1}});
    REQUIRE(ticket);
    while (const auto item = scheduler->try_take(0, kind_bit(kind))) {
      std::vector<PageTask> tasks;
      for (size_t i = 0; i < item->positions().size(); ++i) {
        const PageMove move = item->page(i);
        tasks.push_back({item, i, move, move.place});
      }
      disk.push(std::move(tasks), *scheduler);
    }
    return *ticket;
  };
  // All of them wait when the disk begins: the writes came first.
  const std::vector<int64_t> tickets{push(OpKind::kDiskWrite, 0, kWrites),
                                     push(OpKind::kDiskRead, kWrites, kReads)};
  REQUIRE(disk.queued() == kWrites + kReads);
  std::thread thread([&] { disk.run(scheduler); });
  for (const int64_t ticket : tickets) CHECK(scheduler->wait(ticket, kWaitS));
  disk.stop();
  thread.join();
  CHECK(wrong_turn(*order) == "");
  scheduler->begin_close();
  disk.close_files();
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
