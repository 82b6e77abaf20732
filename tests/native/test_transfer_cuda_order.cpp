// Tests which copies the engine's stream waits for, and which copies need not wait for all work of the
// engine's stream. The tests stop the fake driver's streams to decide the order of work.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <future>

#include "base/error.h"
#include "cuda/event.h"
#include "cuda_forward.h"
#include "thread_watch.h"
#include "transfer/host_mover.h"

using namespace flexkv;

namespace {

constexpr int kManyStores = 5;  // more stores than the lane has in flight at a time

// Stores blocks 0 to 4, which a running forward pass writes. The next forward pass overwrites all these
// blocks; if `ordered` is true, it runs after the copies. Returns whether every store has the bytes of the
// first forward pass.
bool stores_are_whole(CudaWorld& world, bool ordered) {
  std::array<int64_t, kManyStores> tickets{};
  {
    Forward first(world, [&] {
      for (int32_t block = 0; block < kManyStores; ++block) world.fill(block, 40 + block);
    });
    for (int32_t i = 0; i < kManyStores; ++i) {
      tickets[static_cast<size_t>(i)] = world.submit(world.op(OpKind::kD2H, {i}, {i}));
    }
    CHECK_FALSE(world.engine->wait(tickets.back(), kAWhileS));  // the last store waits for the forward pass
    for (const int64_t ticket : tickets) {
      if (ordered) REQUIRE(world.engine->order_after(ticket, CudaWorld::kLongS, world.stream));
    }
    // The first forward pass still runs, so order_after() did not wait for it.
    REQUIRE_FALSE(world.engine->wait(tickets.front(), 0));
    if (!ordered) {  // holds the copies, so that the next forward pass always runs first
      fake_cuda::hold_all(true);
      fake_cuda::release_stream(world.stream);
    }
    fake_cuda::enqueue(world.stream, [&] {
      for (int32_t block = 0; block < kManyStores; ++block) world.fill(block, 90);
    });
  }
  fake_cuda::hold_all(false);
  bool whole = true;
  for (int32_t i = 0; i < kManyStores; ++i) {
    REQUIRE(world.engine->wait(tickets[static_cast<size_t>(i)], CudaWorld::kLongS));
    whole = whole && world.slot_holds(i, 40 + i);
  }
  return whole;
}

// Whether a load into block 1 finishes while a forward pass that does `work` still runs. If `recorded_before`
// is true, the load waits only for a point in the stream that was recorded before the forward pass.
bool load_ends_beside(CudaWorld& world, bool recorded_before, std::function<void()> work, OpResult& result) {
  world.fill(1, 3);
  REQUIRE(world.run(world.op(OpKind::kD2H, {1}, {1})).status == Status::kOk);
  world.fill(1, 5);
  const auto before = world.engine->record(world.stream);
  bool ended = false;
  {
    Forward forward(world, std::move(work));
    GraphSpec graph;
    graph.ops.push_back(world.op(OpKind::kH2D, {1}, {1}));
    if (recorded_before) graph.fence = before;
    const auto ticket = world.engine->submit(std::move(graph), world.stream);
    REQUIRE(ticket);
    ended = world.engine->wait(*ticket, recorded_before ? CudaWorld::kLongS : kAWhileS);
    forward.let_go();
    REQUIRE(world.engine->wait(*ticket, CudaWorld::kLongS));
  }
  result = world.engine->poll(1).front();
  return ended;
}

// A lane for stores to disk that finish only after the test calls let_end().
class DiskStores : public Lane {
 public:
  explicit DiskStores(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~DiskStores() override { join(); }
  const char* name() const override { return "disk stores"; }
  KindSet kinds() const override { return kind_bit(OpKind::kGdsWrite); }
  int32_t concurrency() const override { return 1; }
  PageSizes check(const OpSpec&) const override { return {}; }
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override {
    thread_ = std::thread([source = std::move(source), lane, may_end = may_end_.get_future()] {
      while (const auto item = source->take(lane)) {
        may_end.wait();
        // Like the real lane, this lane finishes no store before the engine's stream has reached the store's
        // fence.
        static_cast<cuda::Event&>(*item->fence()).wait();
        source->finish(item, std::vector<MoveResult>(item->positions().size()));
      }
    });
  }
  bool needs_stream() const override { return true; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override {
    return cuda::record_engine(device_, stream);
  }
  void join() override {
    if (thread_.joinable()) thread_.join();
  }
  void abandon() override { join(); }
  void let_end() { may_end_.set_value(); }

 private:
  const std::shared_ptr<cuda::Device> device_;
  std::promise<void> may_end_;
  std::thread thread_;
};

}  // namespace

TEST_CASE(
    "cuda order: a forward that overwrites stored blocks starts after their copies, the host waits not") {
  auto world = make_world();
  CHECK(stores_are_whole(*world, true));
}

TEST_CASE("cuda order: control: without the order the stores have the next forward's bytes") {
  auto world = make_world();
  CHECK_FALSE(stores_are_whole(*world, false));
}

TEST_CASE("cuda order: short runs go to the kernel, in their turn and out of it") {
  auto world = make_world();
  const int64_t kernels = fake_cuda::calls().kernel;
  CHECK(stores_are_whole(*world, true));
  CHECK(fake_cuda::calls().kernel - kernels == kManyStores);
}

TEST_CASE("cuda order: a store is enqueued ahead of older ones that wait for their turn") {
  auto world = make_world();
  std::array<int64_t, kManyStores> tickets{};
  {
    const int64_t kernels = fake_cuda::calls().kernel;
    Forward forward(*world, [&] { world->fill(kManyStores - 1, 7); });
    for (int32_t i = 0; i < kManyStores; ++i) {
      tickets[static_cast<size_t>(i)] = world->submit(world->op(OpKind::kD2H, {i}, {i}));
    }
    CHECK(comes_true([&] { return fake_cuda::calls().kernel == kernels + 2; }));  // the third store waits
    REQUIRE(world->engine->order_after(tickets.back(), CudaWorld::kLongS, world->stream));
    CHECK(fake_cuda::calls().kernel == kernels + 3);
    fake_cuda::enqueue(world->stream, [&] { world->fill(kManyStores - 1, 90); });
  }
  for (const int64_t ticket : tickets) REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world->slot_holds(kManyStores - 1, 7));
}

TEST_CASE("cuda order: what is left of a page that goes layer by layer is enqueued as one") {
  auto world = make_world();
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kD2H, {7, 8}, {7, 8}, true));
  std::optional<int64_t> ticket;
  {
    Forward forward(*world, [&] {
      world->fill(7, 1);
      world->fill(8, 2);
    });
    // These two stores occupy the lane, so that it takes no item of the third store.
    world->submit(world->op(OpKind::kD2H, {0}, {0}));
    world->submit(world->op(OpKind::kD2H, {1}, {1}));
    ticket = world->engine->submit(std::move(graph), world->stream);
    REQUIRE(ticket);
    REQUIRE(world->engine->order_after(*ticket, CudaWorld::kLongS, world->stream));
    fake_cuda::enqueue(world->stream, [&] {
      world->fill(7, 90);
      world->fill(8, 90);
    });
  }
  REQUIRE(world->engine->wait(*ticket, CudaWorld::kLongS));
  CHECK(world->slot_holds(7, 1));
  CHECK(world->slot_holds(8, 2));
}

TEST_CASE("cuda order: the rest of a layer that is copied in portions is enqueued at once") {
  auto world = make_world({.layers = 1, .blocks = 3, .run_bytes = 3 * kSubBatchBytes, .extent_slots = 1});
  int64_t ticket = 0;
  {
    Forward forward(*world, [&] { world->fill(2, 1); });
    ticket = world->submit(world->op(OpKind::kD2H, {2}, {0}));
    CHECK_FALSE(world->engine->wait(ticket, kAWhileS));  // two portions are enqueued and wait
    REQUIRE(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    fake_cuda::enqueue(world->stream, [&] { world->fill(2, 90); });
  }
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world->slot_holds(0, 1));
}

TEST_CASE("cuda order: a page whose copy the driver refuses fails by name, and nothing waits for ever") {
  // This lane has no copy kernel, because a failure of the kernel would not fail any page.
  const cuda::CopySwitches no_kernel{.batch = true, .kernel = false};
  const auto world = std::make_unique<CudaWorld>(CudaShape{}, fake_cuda::Settings{}, no_kernel);
  int64_t ticket = 0;
  {
    Forward forward(*world, [] {});
    world->submit(world->op(OpKind::kD2H, {0}, {0}));
    world->submit(world->op(OpKind::kD2H, {1}, {1}));
    world->submit(world->op(OpKind::kD2H, {2}, {2}));
    ticket = world->submit(world->op(OpKind::kD2H, {3}, {3}));
    CHECK_FALSE(world->engine->wait(ticket, kAWhileS));
    fake_cuda::fail_copy(0);
    // Part of the page may still be in flight until the stream has passed its copies.
    CHECK_FALSE(world->engine->order_after(ticket, kAWhileS, world->stream));
    forward.let_go();
    CHECK(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
  }
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world->engine->poll(4).back().failed == std::vector<int32_t>{0});
}

TEST_CASE("cuda order: layers that were not opened are not waited for longer than the deadline") {
  auto world = make_world();
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kD2H, {2}, {0}, true));
  graph.gated = true;
  const auto ticket = world->engine->submit(std::move(graph), world->stream);
  REQUIRE(ticket);
  CHECK_FALSE(world->engine->order_after(*ticket, 0.02, world->stream));
  world->engine->open_layers({*ticket}, 3, world->stream);
  CHECK(world->engine->order_after(*ticket, CudaWorld::kLongS, world->stream));
  CHECK(world->engine->wait(*ticket, CudaWorld::kLongS));
}

TEST_CASE("cuda order: an op that has ended, or was forgotten, orders nothing") {
  auto world = make_world();
  const int64_t ticket = world->submit(world->op(OpKind::kD2H, {2}, {0}));
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  const int64_t waits = fake_cuda::calls().waits;
  CHECK(world->engine->order_after(ticket, 0, world->stream));
  CHECK(fake_cuda::calls().waits == waits);
  CHECK_THROWS_AS(world->engine->order_after(ticket + 1, 0, world->stream), ContractError);
  CHECK_THROWS_AS(world->engine->order_after(ticket, 0), ContractError);  // the stream argument is missing
}

TEST_CASE("cuda order: stores out of turn that hang take their own direction down, and loads go on") {
  auto world = make_world();
  world->fill(1, 3);
  REQUIRE(world->run(world->op(OpKind::kD2H, {1}, {1})).status == Status::kOk);
  world->make_engine(
      std::make_shared<cuda::CudaLane>(world->device, fake_cuda::copy_kernels(), cuda::CopySwitches{}), 1);
  const auto lane = [&](OpKind kind) {
    const auto lanes = world->engine->lanes();
    return *std::find_if(lanes.begin(), lanes.end(), [&](const auto& one) { return one.kind == kind; });
  };
  const auto before = world->engine->record(world->stream);
  std::array<int64_t, 4> tickets{};  // as many stores as both directions together have in flight
  {
    Forward forward(*world, [] {});
    for (int64_t& ticket : tickets) ticket = world->submit(world->op(OpKind::kD2H, {2}, {2}));
    for (const int64_t ticket : tickets) {
      REQUIRE(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    }
    const auto deadline = deadline_in(CudaWorld::kLongS);
    while (lane(OpKind::kD2H).stuck.size() < tickets.size() && seconds_until(deadline) > 0) {
      std::this_thread::yield();
    }
    CHECK_FALSE(lane(OpKind::kD2H).up);
    CHECK(lane(OpKind::kH2D).up);
    GraphSpec graph;
    graph.ops.push_back(world->op(OpKind::kH2D, {1}, {1}));
    graph.fence = before;
    const auto load = world->engine->submit(std::move(graph), world->stream);
    REQUIRE(load);
    REQUIRE(world->engine->wait(*load, CudaWorld::kLongS));
    CHECK(world->engine->poll(1).front().status == Status::kOk);
  }
  for (const int64_t ticket : tickets) REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  CHECK(lane(OpKind::kD2H).up);  // the lane is up again when its stuck copies have finished
}

TEST_CASE("cuda order: a load behind a point before the forward does not wait for it") {
  auto world = make_world();
  OpResult result;
  CHECK(load_ends_beside(*world, true, [] {}, result));
  CHECK(result.status == Status::kOk);
  CHECK(world->holds(1, 3));
  CHECK_FALSE(load_ends_beside(*world, false, [] {}, result));  // without the recorded point, the load waits
}

TEST_CASE("cuda order: control: a forward that touches what is loaded must be waited for") {
  auto world = make_world();
  OpResult result;
  const auto clears = [&] { world->fill(1, 0); };
  CHECK(load_ends_beside(*world, true, clears, result));
  CHECK_FALSE(world->holds(1, 3));
  CHECK_FALSE(load_ends_beside(*world, false, clears, result));
  CHECK(world->holds(1, 3));
}

TEST_CASE("cuda order: a lane without streams waits for the end of a store, and records no point") {
  auto world = make_world();
  TransferEngine plain(std::make_shared<HostMover>(), {});
  plain.attach_view(0, world->view, world->pool, 0);
  world->fill(3, 4);
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kD2H, {3}, {3}));
  const auto ticket = plain.submit(std::move(graph));
  REQUIRE(ticket);
  CHECK(plain.order_after(*ticket, CudaWorld::kLongS));
  CHECK(world->slot_holds(3, 4));
  CHECK_THROWS_AS(plain.record(world->stream), ContractError);
  CHECK_THROWS_AS(plain.order_after(*ticket, 0, world->stream), ContractError);
  CHECK(plain.close(CudaWorld::kLongS));
}

TEST_CASE(
    "cuda order: a store to disk is waited for beside no forward, and not at all behind one that runs") {
  auto world = make_world();
  const auto disk = std::make_shared<DiskStores>(world->device);
  TransferEngine engine(
      nullptr, {},
      {std::make_shared<cuda::CudaLane>(world->device, fake_cuda::copy_kernels(), cuda::CopySwitches{}),
       disk});
  engine.attach_view(0, world->view, world->pool, 0);
  const auto before = engine.record(world->stream);
  const auto store = [&](int32_t block, std::shared_ptr<StreamEvent> fence = nullptr) {
    GraphSpec graph;
    graph.ops.push_back(world->op(OpKind::kGdsWrite, {block}, {}));
    graph.ops.back().places = {block};
    graph.ops.back().tags.resize(kTagBytes);
    graph.fence = std::move(fence);
    const auto given = engine.submit(std::move(graph), world->stream);
    REQUIRE(given);
    return *given;
  };
  int64_t ticket = 0;
  const auto took = [&](double deadline_s, bool behind_forward) {
    const auto begin = Clock::now();
    const auto ordered = engine.order_after(ticket, deadline_s, world->stream);
    CHECK_FALSE(ordered.in_time);
    CHECK(ordered.behind_forward == behind_forward);
    return seconds_since(begin);
  };
  {
    Forward forward(*world, [] {});
    ticket = store(2);
    CHECK(took(CudaWorld::kLongS, true) < CudaWorld::kLongS / 2);
  }
  CHECK(took(kAWhileS, false) >= kAWhileS);
  {
    // A later store waits behind a forward pass, but the lane has already begun the store `ticket`.
    Forward forward(*world, [] {});
    const int64_t later = store(3);
    CHECK(took(kAWhileS, false) >= kAWhileS);
    disk->let_end();
    CHECK(engine.order_after(ticket, CudaWorld::kLongS, world->stream));
    ticket = later;
    CHECK(took(CudaWorld::kLongS, true) < CudaWorld::kLongS / 2);
    // Store 4 could run if the later store did not occupy the lane.
    ticket = store(4, before);
    CHECK(took(CudaWorld::kLongS, true) < CudaWorld::kLongS / 2);
  }
  CHECK(engine.order_after(ticket, CudaWorld::kLongS, world->stream));
  CHECK(engine.close(CudaWorld::kLongS));
}
