// Tests the fences between the engine's stream and the CUDA lane's streams. The tests stop the fake driver's
// streams to decide the order of work. Each test has a control without the fence, in which the wrong bytes
// must appear.
#include <doctest/doctest.h>

#include <condition_variable>
#include <mutex>

#include "base/error.h"
#include "cuda_world.h"
#include "thread_watch.h"

using namespace flexkv;

namespace {

// A lane without fences: its events on the engine's stream count as reached at once.
class UnfencedLane : public cuda::CudaLane {
 public:
  using CudaLane::CudaLane;
  struct Nothing : StreamEvent {
    std::string make_wait(StreamId) override { return {}; }
    bool reached() override { return true; }
  };
  std::shared_ptr<StreamEvent> record(StreamId) override { return std::make_shared<Nothing>(); }
  std::string make_wait(StreamEvent&, StreamId) override { return {}; }
};

// Blocks a stream that calls pass() until the gate is open.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

std::unique_ptr<CudaWorld> make_world(bool fenced) {
  auto world = std::make_unique<CudaWorld>(CudaShape{}, fake_cuda::Settings{}, cuda::CopySwitches{});
  if (!fenced) {
    world->make_engine(
        std::make_shared<UnfencedLane>(world->device, fake_cuda::copy_kernels(), cuda::CopySwitches{}));
  }
  return world;
}

// Whether a store copied the bytes that the preceding forward pass wrote.
bool store_sees_the_forward(bool fenced) {
  auto world = make_world(fenced);
  world->fill(2, 1);
  Gate gate;
  fake_cuda::enqueue(world->stream, [&] {
    gate.pass();
    world->fill(2, 7);
  });
  const int64_t ticket = world->submit(world->op(OpKind::kD2H, {2}, {0}));
  world->engine->wait(ticket, fenced ? kAWhileS : CudaWorld::kLongS);
  gate.open();
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  fake_cuda::drain(world->stream);
  return world->slot_holds(0, 7);
}

// Whether a forward pass that was enqueued before a load still read the block's old content.
bool forward_reads_before_the_load(bool fenced) {
  auto world = make_world(fenced);
  world->fill(1, 3);
  REQUIRE(world->run(world->op(OpKind::kD2H, {1}, {1})).status == Status::kOk);
  world->fill(1, 5);
  Gate gate;
  bool read_old = false;
  fake_cuda::enqueue(world->stream, [&] {
    gate.pass();
    read_old = world->holds(1, 5);
  });
  const int64_t ticket = world->submit(world->op(OpKind::kH2D, {1}, {1}));
  world->engine->wait(ticket, fenced ? kAWhileS : CudaWorld::kLongS);
  gate.open();
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  fake_cuda::drain(world->stream);
  REQUIRE(world->holds(1, 3));
  return read_old;
}

// Whether work that the engine enqueues after wait_layer() reads the layer's new bytes, although the layer's
// copy has not begun when wait_layer() returns.
bool forward_sees_the_layer(bool fenced) {
  auto world = make_world(fenced);
  world->fill(1, 3);
  REQUIRE(world->run(world->op(OpKind::kD2H, {1}, {1})).status == Status::kOk);
  world->fill(1, 5);
  Gate copies;
  // The load's fence waits for this stream, so that the load's copies do not begin before `copies` is open.
  const uintptr_t other = fake_cuda::make_stream(false);
  fake_cuda::enqueue(other, [&] { copies.pass(); });
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kH2D, {1}, {1}, true));
  graph.fence = world->lane->record(other);
  const auto ticket = world->engine->submit(std::move(graph), world->stream);
  REQUIRE(ticket);
  const LayerWait answer = world->engine->wait_layer_on(*ticket, 0, CudaWorld::kLongS, world->stream);
  REQUIRE(answer.in_time);  // wait_layer_on() returns because the copy is enqueued, behind `other`
  REQUIRE(answer.failed.empty());
  CHECK_FALSE(world->layer_holds(0, 1, 3));
  bool saw = false;
  fake_cuda::enqueue(world->stream, [&] { saw = world->layer_holds(0, 1, 3); });
  if (!fenced) fake_cuda::drain(world->stream);
  copies.open();
  REQUIRE(world->engine->wait(*ticket, CudaWorld::kLongS));
  fake_cuda::drain(world->stream);
  REQUIRE(world->holds(1, 3));
  fake_cuda::destroy_stream(other);
  return saw;
}

// Whether a store that is submitted before a forward pass stores each layer as the forward pass wrote it.
bool gated_store_sees_every_layer(bool fenced) {
  auto world = make_world(fenced);
  world->fill(2, 1);
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kD2H, {2}, {0}, true));
  graph.gated = true;
  const auto ticket = world->engine->submit(std::move(graph), world->stream);
  REQUIRE(ticket);
  for (int32_t layer = 0; layer < world->shape_.layers; ++layer) {
    Gate gate;
    fake_cuda::enqueue(world->stream, [&] {
      gate.pass();
      world->fill_layer(layer, 2, 7);
    });
    world->engine->open_layers({*ticket}, layer + 1, world->stream);
    world->engine->wait(*ticket, kAWhileS);
    gate.open();
    fake_cuda::drain(world->stream);
  }
  REQUIRE(world->engine->wait(*ticket, CudaWorld::kLongS));
  return world->slot_holds(0, 7);
}

}  // namespace

TEST_CASE("cuda fences: a gated store copies each layer after the work that wrote it") {
  CHECK(gated_store_sees_every_layer(true));
  CHECK_FALSE(gated_store_sees_every_layer(false));
}

TEST_CASE("cuda fences: layers that were opened behind two streams each wait for their own") {
  auto world = make_world(true);
  world->fill(2, 1);
  const uintptr_t other = fake_cuda::make_stream(false);
  Gate forward, layer;
  fake_cuda::enqueue(world->stream, [&] { forward.pass(); });
  // These two stores occupy the lane. So it takes no layer of the gated store before all layers are open.
  const int64_t before = fake_cuda::calls().kernel;
  for (int32_t i = 0; i < 2; ++i) world->submit(world->op(OpKind::kD2H, {i}, {4 + i}));
  CHECK(comes_true([&] { return fake_cuda::calls().kernel == before + 2; }));
  GraphSpec graph;
  graph.ops.push_back(world->op(OpKind::kD2H, {2}, {0}, true));
  graph.gated = true;
  const auto ticket = world->engine->submit(std::move(graph), world->stream);
  REQUIRE(ticket);
  fake_cuda::enqueue(other, [&] {
    layer.pass();
    world->fill_layer(0, 2, 7);
  });
  for (int32_t later = 1; later < world->shape_.layers; ++later) world->fill_layer(later, 2, 7);
  world->engine->open_layers({*ticket}, 1, other);
  world->engine->open_layers({*ticket}, world->shape_.layers, world->stream);
  forward.open();
  const bool early = world->engine->wait(*ticket, kAWhileS);
  layer.open();
  fake_cuda::drain(other);
  CHECK_FALSE(early);
  CHECK(world->engine->wait(*ticket, CudaWorld::kLongS));
  CHECK(world->slot_holds(0, 7));
  fake_cuda::destroy_stream(other);
}

TEST_CASE("cuda fences: layers of a device are opened with its stream") {
  auto world = make_world(true);
  CHECK_THROWS_AS(world->engine->open_layers({}, 1), ContractError);
}

TEST_CASE("cuda fences: a store copies after the forward that wrote the block") {
  CHECK(store_sees_the_forward(true));
  CHECK_FALSE(store_sees_the_forward(false));
}

TEST_CASE("cuda fences: a load overwrites after the forwards that still read the block") {
  CHECK(forward_reads_before_the_load(true));
  CHECK_FALSE(forward_reads_before_the_load(false));
}

TEST_CASE("cuda fences: what follows wait_layer sees the layer, though the host did not wait for the copy") {
  CHECK(forward_sees_the_layer(true));
  CHECK_FALSE(forward_sees_the_layer(false));
}

TEST_CASE("cuda fences: wait_layer names failed pages and adds no wait") {
  // This lane has no copy kernel, because a failure of the kernel would not fail any page.
  const cuda::CopySwitches no_kernel{.batch = true, .kernel = false};
  auto world = std::make_unique<CudaWorld>(CudaShape{}, fake_cuda::Settings{}, no_kernel);
  fake_cuda::fail_copy(0);
  const int64_t ticket = world->submit(world->op(OpKind::kH2D, {1, 2}, {1, 2}));
  const int64_t waits = fake_cuda::calls().waits;
  const LayerWait answer = world->engine->wait_layer_on(ticket, 2, CudaWorld::kLongS, world->stream);
  CHECK(answer.in_time);
  REQUIRE(answer.failed.size() == 1);
  CHECK(answer.failed.front().second == std::vector<int32_t>{0, 1});
  CHECK(fake_cuda::calls().waits <= waits + 1);  // the lane's own wait for the op's fence
  // The wait for a layer ends at its deadline, but the load continues.
  Gate gate;
  fake_cuda::enqueue(world->stream, [&] { gate.pass(); });
  std::vector<int64_t> tickets;
  for (int32_t i = 0; i < 3; ++i) tickets.push_back(world->submit(world->op(OpKind::kH2D, {i}, {i})));
  CHECK_FALSE(world->engine->wait_layer_on(tickets[2], 0, 0.05, world->stream).in_time);  // two are in flight
  gate.open();
  CHECK(world->engine->wait_layer_on(tickets[2], 0, CudaWorld::kLongS, world->stream).in_time);
  CHECK(world->engine->wait(tickets[2], CudaWorld::kLongS));
}
