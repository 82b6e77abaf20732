// Tests that every event that ends a wait wakes the waiting thread. The deadlines of the waits are longer
// than any test, so a test fails if a thread is not woken. With short deadlines the thread would only seem
// slow.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hand_lane.h"
#include "thread_watch.h"
#include "transfer/scheduler.h"

using namespace flexkv;

namespace {

// Unit: seconds. kForeverS is longer than any test. kNotYetS is how long a test waits for an event that must
// not happen.
constexpr double kForeverS = 1e6, kNotYetS = 0.2;
constexpr int32_t kStages = 4;

struct NamedPoint : StreamEvent {
  std::string make_wait(StreamId) override { return {}; }
  bool reached() override { return true; }
};

// A scheduler with a lane whose items the test takes. Each page of an op is a separate item, unless the lane
// takes all stages. Each layer is a stage.
struct WaiterWorld {
  explicit WaiterWorld(bool all_stages) : lane(std::make_shared<HandLane>(all_stages)) {
    scheduler.add_lane(lane);
  }
  int64_t submit(OpKind kind, int32_t pages, bool gated = false) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = kind;
    op.priority = Priority::kStore;
    op.layerwise = true;
    for (int32_t i = 0; i < pages; ++i) {
      op.blocks.push_back(i);
      op.slots.push_back(i);
    }
    GraphSpec graph;
    graph.ops.push_back(op);
    graph.gated = gated;
    const auto ticket = scheduler.submit(std::move(graph), {nullptr},
                                         {{.bytes = kStages * kSubBatchBytes, .layers = kStages}});
    REQUIRE(ticket);
    return *ticket;
  }
  std::shared_ptr<WorkItem> take() {
    auto item = scheduler.try_take(0, lane->kinds());
    REQUIRE(item);
    return item;
  }
  void issue(const std::shared_ptr<WorkItem>& item, int32_t stage) {
    const std::shared_ptr<StreamEvent> point = std::make_shared<NamedPoint>();
    scheduler.issued(item, stage, std::span(&point, 1));
  }

  const std::shared_ptr<HandLane> lane;
  Scheduler scheduler{64, 0};
  int64_t next_op = 1;
};

// Whether `wait` returns after `end` is called, and not before. If `wait` does not return, its thread and the
// test's objects stay alive.
bool is_woken(const std::shared_ptr<WaiterWorld>& world, std::function<void(Scheduler&)> wait,
              const std::function<void()>& end) {
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  std::thread([world, wait = std::move(wait), ended] {
    wait(world->scheduler);
    *ended = true;
  }).detach();
  CHECK_FALSE(comes_true([&] { return ended->load(); }, kNotYetS));
  end();
  return comes_true([&] { return ended->load(); });
}

}  // namespace

TEST_CASE("transfer waiters: a wait for a layer is woken when the last page's item has moved it") {
  const auto world = std::make_shared<WaiterWorld>(false);
  const int64_t ticket = world->submit(OpKind::kH2D, 1);
  world->submit(OpKind::kH2D, 1);
  const auto item = world->take();
  world->take();  // so that the lane is not idle afterwards
  CHECK(is_woken(
      world, [=](Scheduler& scheduler) { scheduler.wait_layer(ticket, 0, kForeverS); },
      [&] { world->scheduler.finish(item, {MoveResult{}}); }));
}

TEST_CASE("transfer waiters: a wait for a layer is woken when the item has passed it") {
  const auto world = std::make_shared<WaiterWorld>(true);
  const int64_t ticket = world->submit(OpKind::kH2D, 2);
  const auto item = world->take();
  CHECK(is_woken(
      world, [=](Scheduler& scheduler) { scheduler.wait_layer(ticket, 1, kForeverS); },
      [&] { world->scheduler.passed(item, 1); }));
}

TEST_CASE("transfer waiters: a wait for a layer is woken when its last page fails") {
  const auto world = std::make_shared<WaiterWorld>(false);
  const int64_t ticket = world->submit(OpKind::kH2D, 2);
  const auto first = world->take(), second = world->take();
  world->scheduler.finish(first, {MoveResult{}});
  world->take();  // takes the next layer, so that the lane is not idle afterwards
  CHECK(is_woken(
      world, [=](Scheduler& scheduler) { scheduler.wait_layer(ticket, 0, kForeverS); },
      [&] {
        world->scheduler.finish(second, {MoveResult{Status::kFailed, "a test's", {}, FailureCause::kSource}});
      }));
}

TEST_CASE("transfer waiters: waits for copies to be on their way are woken when they are") {
  for (const OpKind kind : {OpKind::kH2D, OpKind::kD2H}) {
    const auto world = std::make_shared<WaiterWorld>(true);
    const int64_t ticket = world->submit(kind, 2);
    const auto item = world->take();
    CHECK(is_woken(
        world,
        [=](Scheduler& scheduler) {
          if (kind == OpKind::kH2D) scheduler.wait_layer(ticket, kStages - 1, kForeverS, true);
          if (kind == OpKind::kD2H) scheduler.enqueue_all(ticket, kForeverS, true);
        },
        [&] { world->issue(item, kStages - 1); }));
  }
}

TEST_CASE("transfer waiters: a wait for quiet is woken by the last item, though its op goes on") {
  const auto world = std::make_shared<WaiterWorld>(false);
  world->submit(OpKind::kH2D, 2);
  const auto item = world->take();
  CHECK(is_woken(
      world, [](Scheduler& scheduler) { scheduler.wait_quiet(kForeverS); },
      [&] { world->scheduler.finish(item, {MoveResult{}}); }));
}

TEST_CASE("transfer waiters: a lane is woken for what it may take, enqueue, add and drop") {
  WaiterWorld world(true);
  const int64_t ticket = world.submit(OpKind::kD2H, 2, true);
  const auto wakes_of = [&](const std::function<void()>& call) {
    const int before = world.lane->wakes;
    call();
    return world.lane->wakes - before;
  };
  CHECK(world.lane->wakes.load() == 0);  // no byte of the op may move yet
  CHECK(wakes_of([&] { world.scheduler.open_layers({ticket}, 1, nullptr); }) > 0);
  const auto item = world.take();
  CHECK(wakes_of([&] { world.scheduler.open_layers({ticket}, 2, nullptr); }) > 0);
  CHECK(world.scheduler.extend(item));
  CHECK(wakes_of([&] { world.scheduler.enqueue_all(ticket, 0, true); }) > 0);
  CHECK(wakes_of([&] { world.scheduler.enqueue_all(ticket, 0, true); }) == 0);  // the op is expedited already
  CHECK(wakes_of([&] { world.scheduler.cancel(ticket); }) > 0);
}

TEST_CASE("transfer events: each stage has its own, in order, and those before them the first one") {
  WaiterWorld world(true);
  std::vector<std::shared_ptr<StreamEvent>> points;
  for (int i = 0; i < 3; ++i) points.push_back(std::make_shared<NamedPoint>());
  const int64_t load = world.submit(OpKind::kH2D, 2);
  const auto loading = world.take();
  world.scheduler.issued(loading, kStages - 1, points);
  for (int32_t layer = 0; layer < kStages; ++layer) {
    const LayerWait answer = world.scheduler.wait_layer(load, layer, 0, true);
    CHECK(answer.in_time);
    REQUIRE(answer.events.size() == 1);
    CHECK(answer.events.front().second == points[static_cast<size_t>(std::max(0, layer - 1))]);
  }
  const int64_t store = world.submit(OpKind::kD2H, 2);
  const auto storing = world.take();
  world.scheduler.issued(storing, kStages - 1, points);
  const Scheduler::Enqueued ordered = world.scheduler.enqueue_all(store, 0, true);
  CHECK(ordered.in_time);
  REQUIRE(ordered.events.size() == 1);
  CHECK(ordered.events.front().second == points.back());
}
