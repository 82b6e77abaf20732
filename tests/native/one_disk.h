// One disk (class Disk) without a disk lane. The test itself gives pages to the disk.
#pragma once
#include <doctest/doctest.h>

#include <cstdio>
#include <functional>
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

inline constexpr int64_t kOneDiskPageBytes = 4096;

// A lane that takes no work items: the test takes them and gives their pages to the disk.
class IdleLane final : public Lane {
 public:
  const char* name() const override { return "idle"; }
  KindSet kinds() const override { return kind_bit(OpKind::kDiskRead) | kind_bit(OpKind::kDiskWrite); }
  int32_t concurrency() const override { return 1; }
  void start(std::shared_ptr<WorkSource>, int32_t) override {}
  void join() override {}
  void abandon() override {}
};

struct OneDisk {
  // `on_change` is passed to the constructor of Disk.
  OneDisk(
      int32_t places, const DiskOptions& options, WrapQueue wrap, std::function<void()> on_change = [] {}) {
    codec = page_codec(1, kOneDiskPageBytes);
    const auto pool = HostPool::create({codec->image_bytes(), places, kMaxExtentBytes}, {});
    REQUIRE(pool->wait_ready(places, kWaitS));
    const SlabShape shape = make_slab(path, *codec, places, 1);
    std::vector<DiskGroup> groups;
    groups.push_back({codec, {}, pool});
    disk = std::make_unique<Disk>(0, std::vector{std::make_shared<SlabFile>(path, shape, -1)},
                                  std::make_shared<const std::vector<DiskGroup>>(std::move(groups)), options,
                                  std::move(wrap), std::move(on_change));
    scheduler = std::make_shared<Scheduler>(places, 0);
    scheduler->add_lane(std::make_shared<IdleLane>());
  }
  ~OneDisk() {
    stop();
    scheduler->begin_close();
    disk->close_files();
    std::remove(path.c_str());
  }

  // Submits one op of `pages` pages, whose host and disk slots are numbered from `first`, and gives its pages
  // to the disk. Returns the ticket.
  int64_t push(OpKind kind, int32_t first, int32_t pages) {
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
      disk->push(std::move(tasks), *scheduler);
    }
    return *ticket;
  }
  void start() {
    thread_ = std::thread([this] { disk->run(scheduler); });
  }
  void stop() {
    disk->stop();
    if (thread_.joinable()) thread_.join();
  }

  const std::string path = "slab-one-disk";
  std::shared_ptr<const PageCodec> codec;
  std::unique_ptr<Disk> disk;
  std::shared_ptr<Scheduler> scheduler;
  int64_t next_op = 1;

 private:
  std::thread thread_;
};

}  // namespace flexkv
