// Tests pages that are stored in several stages. One stage is in flight behind a forward pass. At this time
// the engine orders the next forward pass, which overwrites the pages, after the store. The tests stop the
// fake driver's streams to decide the order of work.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_forward.h"

using namespace flexkv;

namespace {

// A layer is larger than half of a sub-batch, so that each layer is one stage of the store.
constexpr CudaShape kLong{
    .layers = 2, .blocks = 4, .run_bytes = kSubBatchBytes / 2 + 4096, .digests = true, .extent_slots = 1};

// A test that calls this runs once for each path.
std::unique_ptr<CudaWorld> make_either_world(const CudaShape& shape) {
  cuda::CopySwitches switches{.batch = true, .kernel = false};
  SUBCASE("by copy engine") {}
  SUBCASE("by kernel") { switches.kernel = true; }
  return std::make_unique<CudaWorld>(shape, fake_cuda::Settings{}, switches);
}

OpResult result_of(CudaWorld& world, int64_t ticket) {
  REQUIRE(world.engine->wait(ticket, CudaWorld::kLongS));
  for (OpResult& result : world.engine->poll(64)) {
    if (result.ticket == ticket) return result;
  }
  FAIL("no result of ticket " << ticket);
  return {};
}

// Stores `blocks` behind a forward pass that writes them. The next forward pass overwrites all of them. If
// `ordered` is true, the engine's stream waits for the copies; otherwise the next forward pass runs before
// the copies. Returns the store's result.
OpResult store_behind_forward(CudaWorld& world, const std::vector<int32_t>& blocks, bool layerwise,
                              bool ordered) {
  GraphSpec graph;
  graph.ops.push_back(world.op(OpKind::kD2H, blocks, blocks, layerwise));
  std::optional<int64_t> ticket;
  {
    Forward forward(world, [&] {
      for (const int32_t block : blocks) world.fill(block, 10 + block);
    });
    ticket = world.engine->submit(std::move(graph), world.stream);
    REQUIRE(ticket);
    CHECK_FALSE(world.engine->wait(*ticket, kAWhileS));  // copies in flight wait for the forward pass
    if (ordered) {
      REQUIRE(world.engine->order_after(*ticket, CudaWorld::kLongS, world.stream));
      CHECK_FALSE(world.engine->wait(*ticket, 0));  // the forward pass still runs
    } else {
      fake_cuda::hold_all(true);
      fake_cuda::release_stream(world.stream);
    }
    fake_cuda::enqueue(world.stream, [&] {
      for (const int32_t block : blocks) world.fill(block, 90);
    });
  }
  fake_cuda::hold_all(false);
  return result_of(world, *ticket);
}

// Submits a gated layerwise store of block 2. No layer of the store is open yet.
int64_t submit_gated(CudaWorld& world) {
  GraphSpec graph;
  graph.ops.push_back(world.op(OpKind::kD2H, {2}, {2}, true));
  graph.gated = true;
  const auto ticket = world.engine->submit(std::move(graph), world.stream);
  REQUIRE(ticket);
  return *ticket;
}

bool slots_are_whole(CudaWorld& world, const std::vector<int32_t>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [&](int32_t block) { return world.slot_holds(block, 10 + block); });
}

// Whether a load of the page in `slot` succeeds. It succeeds if the page's digests match its bytes.
bool loads(CudaWorld& world, int32_t slot) {
  return world.run(world.op(OpKind::kH2D, {slot}, {slot})).status == Status::kOk;
}

}  // namespace

TEST_CASE("cuda long pages: the later ranges of one in flight behind a forward are enqueued before it ends") {
  auto world = make_either_world(kLong);
  CHECK(store_behind_forward(*world, {2}, false, true).status == Status::kOk);
  CHECK(slots_are_whole(*world, {2}));
  CHECK(loads(*world, 2));
}

TEST_CASE("cuda long pages: control: without the order the later ranges have the next forward's bytes") {
  auto world = make_either_world(kLong);
  CHECK(store_behind_forward(*world, {2}, false, false).status == Status::kOk);
  CHECK_FALSE(slots_are_whole(*world, {2}));
}

TEST_CASE("cuda long pages: control: a byte of a later range that is not what was digested fails a load") {
  auto world = make_either_world(kLong);
  CHECK(store_behind_forward(*world, {2}, false, true).status == Status::kOk);
  world->pool->slot_address(2)[kLong.run_bytes * kLong.layers - 1] ^= std::byte{1};
  CHECK_FALSE(loads(*world, 2));
}

TEST_CASE("cuda long pages: several are extended, with those that have not begun") {
  auto world = make_either_world(kLong);
  CHECK(store_behind_forward(*world, {0, 1, 2, 3}, false, true).status == Status::kOk);
  CHECK(slots_are_whole(*world, {0, 1, 2, 3}));
  for (int32_t slot = 0; slot < 4; ++slot) CHECK(loads(*world, slot));
}

TEST_CASE("cuda long pages: one whose stage itself is cut is extended after its rest") {
  auto world = make_either_world(
      {.layers = 2, .blocks = 3, .run_bytes = kSubBatchBytes + 4096, .digests = true, .extent_slots = 1});
  CHECK(store_behind_forward(*world, {1}, false, true).status == Status::kOk);
  CHECK(slots_are_whole(*world, {1}));
  CHECK(loads(*world, 1));
}

TEST_CASE("cuda long pages: pages that go layer by layer are extended together") {
  auto world = make_either_world({.layers = 5, .blocks = 12, .run_bytes = 4096, .digests = true});
  CHECK(store_behind_forward(*world, {3, 4, 5}, true, true).status == Status::kOk);
  CHECK(slots_are_whole(*world, {3, 4, 5}));
  for (const int32_t slot : {3, 4, 5}) CHECK(loads(*world, slot));
}

TEST_CASE("cuda long pages: layers that are opened after the order was asked for are enqueued then") {
  auto world = make_either_world({.layers = 4, .blocks = 6, .run_bytes = 4096, .digests = true});
  const int64_t ticket = submit_gated(*world);
  {
    Forward forward(*world, [&] { world->fill(2, 12); });
    world->engine->open_layers({ticket}, 1, world->stream);
    CHECK_FALSE(world->engine->order_after(ticket, kAWhileS, world->stream));  // the other layers are closed
    std::thread later([&] { world->engine->open_layers({ticket}, 4, world->stream); });
    CHECK(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    later.join();
    fake_cuda::enqueue(world->stream, [&] { world->fill(2, 90); });
  }
  CHECK(result_of(*world, ticket).status == Status::kOk);
  CHECK(world->slot_holds(2, 12));
  CHECK(loads(*world, 2));
}

TEST_CASE("cuda long pages: later layers are copied after what had been enqueued when they were opened") {
  auto world = make_either_world({.layers = 4, .blocks = 6, .run_bytes = 4096, .digests = true});
  const int64_t ticket = submit_gated(*world);
  {
    Forward first(*world, [&] { world->fill_layer(0, 2, 12); });
    world->engine->open_layers({ticket}, 1, world->stream);
    CHECK_FALSE(world->engine->order_after(ticket, kAWhileS, world->stream));
    Forward second(*world, [&] {
      for (int32_t layer = 1; layer < 4; ++layer) world->fill_layer(layer, 2, 12);
    });
    world->engine->open_layers({ticket}, 4, world->stream);
    CHECK(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    first.let_go();
    CHECK_FALSE(world->engine->wait(ticket, kAWhileS));
  }
  CHECK(result_of(*world, ticket).status == Status::kOk);
  CHECK(world->slot_holds(2, 12));
}

TEST_CASE("cuda long pages: the lane keeps nothing of stores that have ended") {
  auto world = make_either_world({.layers = 2, .blocks = 2, .run_bytes = 4096});
  std::weak_ptr<StreamEvent> kept;
  for (size_t i = 0; i <= kRememberedGraphs; ++i) {
    GraphSpec graph;
    graph.ops.push_back(world->op(OpKind::kD2H, {0}, {0}, true));
    graph.fence = world->engine->record(world->stream);
    if (i == 0) kept = graph.fence;
    const auto ticket = world->engine->submit(std::move(graph), world->stream);
    REQUIRE(ticket);
    REQUIRE(world->engine->order_after(*ticket, CudaWorld::kLongS, world->stream));
    REQUIRE(result_of(*world, *ticket).status == Status::kOk);
  }
  CHECK(kept.expired());
}

TEST_CASE("cuda long pages: a store that was cancelled with one in flight is ordered all the same") {
  auto world = make_either_world(kLong);
  const int64_t ticket = world->submit(world->op(OpKind::kD2H, {0, 1, 2, 3}, {0, 1, 2, 3}));
  REQUIRE(world->engine->wait(ticket, CudaWorld::kLongS));
  std::optional<int64_t> second;
  {
    Forward forward(*world, [] {});
    second = world->submit(world->op(OpKind::kD2H, {0, 1, 2, 3}, {0, 1, 2, 3}));
    CHECK_FALSE(world->engine->wait(*second, kAWhileS));
    world->engine->cancel(*second);
    CHECK(world->engine->order_after(*second, CudaWorld::kLongS, world->stream));
  }
  REQUIRE(world->engine->wait(*second, CudaWorld::kLongS));
  const auto results = world->engine->poll(2);
  // All pages failed, even the first one, although a range of its layers was in flight.
  CHECK(results.back().failed == std::vector<int32_t>{0, 1, 2, 3});
}

TEST_CASE("cuda long pages: a later range that the driver refuses fails the page by name") {
  auto world = std::make_unique<CudaWorld>(kLong, fake_cuda::Settings{},
                                           cuda::CopySwitches{.batch = true, .kernel = false});
  std::optional<int64_t> ticket;
  {
    Forward forward(*world, [&] { world->fill(2, 12); });
    ticket = world->submit(world->op(OpKind::kD2H, {2}, {2}));
    CHECK_FALSE(world->engine->wait(*ticket, kAWhileS));
    fake_cuda::fail_copy(0);
    // The page's enqueued copies may still move bytes until the stream has passed them.
    CHECK_FALSE(world->engine->order_after(*ticket, kAWhileS, world->stream));
    forward.let_go();
    CHECK(world->engine->order_after(*ticket, CudaWorld::kLongS, world->stream));
  }
  const OpResult result = result_of(*world, *ticket);
  CHECK(result.failed == std::vector<int32_t>{0});
  CHECK(result.causes == std::vector{FailureCause::kTransport});
}

TEST_CASE("cuda long pages: whenever the order comes, each page is whole or named") {
  auto world = make_either_world({.layers = 12, .blocks = 4, .run_bytes = 16384, .digests = true});
  for (int32_t block = 0; block < 4; ++block) world->fill(block, 10 + block);
  for (int round = 0; round < 40; ++round) {
    for (int32_t slot = 0; slot < 4; ++slot) {
      std::fill_n(world->pool->slot_address(slot), world->pool->geometry().slot_bytes, std::byte{0});
    }
    const int64_t ticket = world->submit(world->op(OpKind::kD2H, {0, 1, 2, 3}, {0, 1, 2, 3}, true));
    // Orders the engine's stream at a different time in each round, between the store's first stage and its
    // end.
    const auto until = deadline_in(0.00002 * round);
    while (seconds_until(until) > 0) std::this_thread::yield();
    REQUIRE(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    CHECK(result_of(*world, ticket).status == Status::kOk);
    CHECK(slots_are_whole(*world, {0, 1, 2, 3}));
    for (int32_t slot = 0; slot < 4; ++slot) CHECK(loads(*world, slot));
  }
}

TEST_CASE("cuda long pages: what ends while it is looked at has nothing added, and ends all the same") {
  auto world = make_either_world({.layers = 1, .blocks = 2, .run_bytes = 4096});
  for (int round = 0; round < 3000; ++round) {
    const int64_t ticket = world->submit(world->op(OpKind::kD2H, {round % 2}, {round % 2}));
    REQUIRE(world->engine->order_after(ticket, CudaWorld::kLongS, world->stream));
    REQUIRE(result_of(*world, ticket).status == Status::kOk);
  }
}
