// Tests that the scheduler never drops the last reference to an event under its lock. Dropping that reference
// calls the driver, which may wait for the device. Then every other call to the scheduler would wait, too.
#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <thread>

#include "hand_lane.h"
#include "transfer/scheduler.h"

using namespace flexkv;

namespace {

struct Seen {
  int ended = 0;
  int locked = 0;
};

// An event whose destructor checks whether another thread can get the scheduler's lock.
class LookingEvent : public StreamEvent {
 public:
  LookingEvent(const Scheduler& scheduler, Seen& seen) : scheduler_(scheduler), seen_(seen) {}
  ~LookingEvent() override {
    std::promise<void> got;
    std::future<void> answer = got.get_future();
    std::thread([&scheduler = scheduler_, got = std::move(got)]() mutable {
      scheduler.closing();
      got.set_value();
    }).detach();
    ++seen_.ended;
    seen_.locked += answer.wait_for(std::chrono::seconds(5)) != std::future_status::ready;
  }
  std::string make_wait(StreamId) override { return {}; }
  bool reached() override { return true; }

 private:
  const Scheduler& scheduler_;
  Seen& seen_;
};

struct HandWorld {
  HandWorld() { scheduler.add_lane(std::make_shared<HandLane>()); }
  std::shared_ptr<LookingEvent> event() { return std::make_shared<LookingEvent>(scheduler, seen); }
  int64_t submit(int32_t pages, std::shared_ptr<StreamEvent> fence) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = OpKind::kD2H;
    op.priority = Priority::kStore;
    for (int32_t i = 0; i < pages; ++i) {
      op.blocks.push_back(i);
      op.slots.push_back(i);
    }
    GraphSpec graph;
    graph.ops.push_back(op);
    graph.fence = std::move(fence);
    // Each page is a separate item.
    const auto ticket = scheduler.submit(std::move(graph), {nullptr}, {{.bytes = kSubBatchBytes}});
    REQUIRE(ticket);
    return *ticket;
  }
  void issue(const std::shared_ptr<WorkItem>& item) {
    const std::shared_ptr<StreamEvent> own = event();
    scheduler.issued(item, item->last_stage(), std::span(&own, 1));
  }
  void finish(const std::shared_ptr<WorkItem>& item) {
    scheduler.finish(item, std::vector<MoveResult>(item->positions().size()));
  }

  Seen seen;
  Scheduler scheduler{1024, 0};
  int64_t next_op = 1;
};

}  // namespace

TEST_CASE("transfer events: what a later item's event replaces ends without the lock") {
  HandWorld world;
  world.submit(2, nullptr);
  const auto first = world.scheduler.take(0);
  const auto second = world.scheduler.take(0);
  world.issue(first);
  CHECK(world.seen.ended == 0);
  world.issue(second);
  CHECK(world.seen.ended == 1);
  CHECK(world.seen.locked == 0);
  world.finish(first);
  world.finish(second);
}

TEST_CASE("transfer events: a graph's end with it without the lock, when it is forgotten") {
  HandWorld world;
  for (size_t i = 0; i < kRememberedGraphs + 2; ++i) {
    world.submit(1, i == 0 ? world.event() : nullptr);
    const auto item = world.scheduler.take(0);
    if (i == 1) world.issue(item);
    world.finish(item);
  }
  CHECK(world.seen.ended == 0);
  while (!world.scheduler.poll(100).empty()) continue;
  CHECK(world.seen.ended == 2);
  CHECK(world.seen.locked == 0);
}
