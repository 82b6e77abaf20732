// Tests the CUDA lane with the fake driver: every path copies every byte, and the lane keeps the driver's
// rules for batches and fences and its own limits. These tests need no GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "cuda/copy_ways.h"
#include "cuda_world.h"
#include "soak.h"
#include "thread_watch.h"

using namespace flexkv;

namespace {

struct Way {
  const char* name;
  fake_cuda::Settings settings;
  cuda::CopySwitches switches;
  cuda::Path path;
};

const std::vector<Way> kWays = {
    {"batch, 13.0", {.version = 13000}, {.batch = true, .kernel = false}, cuda::Path::kBatch},
    {"batch, 12.8", {.version = 12080}, {.batch = true, .kernel = false}, cuda::Path::kBatch},
    {"old driver", {.version = 12040}, {.batch = true, .kernel = false}, cuda::Path::kSingle},
    {"kernel", {.version = 13000}, {.batch = true, .kernel = true}, cuda::Path::kKernel},
};

// Stores some blocks, and loads them into other blocks in a different order. Checks that all other bytes stay
// unchanged.
void move_there_and_back(const CudaShape& shape, const Way& way, bool layerwise) {
  CAPTURE(way.name);
  CAPTURE(shape.run_bytes);
  CAPTURE(shape.block_first);
  CAPTURE(layerwise);
  CudaWorld world(shape, way.settings, way.switches);
  for (int32_t block = 0; block < shape.blocks; ++block) world.fill(block, block + 1);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2, 5}, {3, 0, 7, 1})).status == Status::kOk);
  CHECK(world.slot_holds(3, 1));
  CHECK(world.slot_holds(7, 3));
  CHECK(world.run(world.op(OpKind::kH2D, {9, 7, 6}, {3, 7, 1}, layerwise)).status == Status::kOk);
  for (int32_t block = 0; block < shape.blocks; ++block) {
    const int expected = block == 9 ? 1 : block == 7 ? 3 : block == 6 ? 6 : block + 1;
    CHECK(world.holds(block, expected));
  }
  if (!shape.block_first) CHECK(world.lane->copier().count(way.path).pieces > 0);
}

}  // namespace

TEST_CASE("cuda lane: every way moves every byte and no other") {
  for (const Way& way : kWays) {
    const std::vector<int64_t> all = {1, 7, 24, 1000, 4096, 9001};
    for (const int64_t run_bytes : kThreadSanitizer ? std::vector<int64_t>{7, 4096} : all) {
      for (const bool block_first : {false, true}) {
        CudaShape shape;
        shape.run_bytes = run_bytes;
        shape.block_first = block_first;
        move_there_and_back(shape, way, run_bytes % 2 == 0);
      }
    }
    CudaShape one;
    one.layers = 1;
    move_there_and_back(one, way, true);
  }
}

TEST_CASE("cuda lane: batches are bounded, attributed from copy 0, and ordered by the stream for stores") {
  CudaShape shape;
  shape.layers = 40;
  shape.blocks = 256;
  shape.run_bytes = 16;
  shape.extent_slots = 64;  // few extents, because preparing many takes long on a busy machine
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  std::vector<int32_t> all;
  for (int32_t i = 0; i < shape.blocks; ++i) all.push_back(i);
  CHECK(world.run(world.op(OpKind::kD2H, all, all)).status == Status::kOk);
  const fake_cuda::Calls calls = fake_cuda::calls();
  CHECK(calls.largest_batch == 256);
  CHECK(calls.orders.back() == cuda::SourceOrder::kStream);
  CHECK(world.run(world.op(OpKind::kH2D, all, all)).status == Status::kOk);
  CHECK(fake_cuda::calls().orders.back() == cuda::SourceOrder::kAny);
}

TEST_CASE("cuda lane: a driver whose batches lose bytes fails the self-test and is not given any") {
  CudaWorld world({}, {.batch_corrupts = true}, {.batch = true, .kernel = false});
  CHECK(world.lane->copier().notes().find("self-test: other bytes came back") != std::string::npos);
  CHECK_FALSE(world.lane->copier().capabilities().batch);
  const int64_t tested = fake_cuda::calls().batch;
  world.fill(0, 9);
  CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
  CHECK(world.slot_holds(0, 9));
  CHECK(fake_cuda::calls().batch == tested);
}

TEST_CASE("cuda lane: batches can be switched off") {
  CudaWorld world({}, {}, {.batch = false, .kernel = false});
  CHECK(world.lane->copier().notes().find("switched off") != std::string::npos);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {0, 1})).status == Status::kOk);
  CHECK(fake_cuda::calls().batch == 0);
}

TEST_CASE("cuda lane: an extent that is not registered never reaches the kernel") {
  CudaWorld world({}, {}, {.batch = true, .kernel = true}, 1);  // slots 4..7 are not registered
  const int64_t tested = fake_cuda::calls().kernel;
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {0, 1})).status == Status::kOk);
  CHECK(fake_cuda::calls().kernel == tested + 1);
  world.fill(2, 5);
  world.fill(3, 8);
  CHECK(world.run(world.op(OpKind::kD2H, {2, 3}, {5, 8})).status == Status::kOk);
  CHECK(fake_cuda::calls().kernel == tested + 2);  // for the page in slot 8
  CHECK(world.lane->copier().count(cuda::Path::kKernel).bytes == 3 * 3 * 1024);
  CHECK(world.slot_holds(5, 5));
  CHECK(world.slot_holds(8, 8));
}

TEST_CASE("cuda lane: an extent that is not registered never reaches a kernel that takes several layers") {
  const CudaShape shape{.layers = 8, .blocks = 16, .run_bytes = 32 << 10, .extent_slots = 8};
  CudaWorld world(shape, {}, kAll, 1);  // slots 8..15 are not registered
  std::vector<int32_t> all(16);
  std::iota(all.begin(), all.end(), 0);
  for (const int32_t block : all) world.fill(block, block + 1);
  CHECK(world.run(world.op(OpKind::kD2H, all, all)).status == Status::kOk);
  const int64_t stored = world.lane->copier().count(cuda::Path::kKernel).bytes;
  CHECK(stored == 8 * 8 * shape.run_bytes);
  for (const int32_t block : all) world.fill(block, 0);
  CHECK(world.run(world.op(OpKind::kH2D, all, all, true)).status == Status::kOk);
  CHECK(world.lane->copier().count(cuda::Path::kKernel).bytes == 2 * stored);
  for (const int32_t block : all) CHECK(world.holds(block, block + 1));
}

TEST_CASE("cuda lane: failures end as named failed pages, and the next transfer works") {
  CudaShape shape;
  shape.digests = true;
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  world.fill(0, 1);
  world.fill(1, 2);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {0, 1})).status == Status::kOk);

  fake_cuda::fail_copy(0);
  OpResult result = world.run(world.op(OpKind::kH2D, {4, 5}, {0, 1}));
  CHECK(result.status == Status::kFailed);
  CHECK(result.failed == std::vector<int32_t>{0, 1});
  CHECK(result.reason.find("cuMemcpyBatchAsync") != std::string::npos);

  fake_cuda::break_stream(true);
  result = world.run(world.op(OpKind::kD2H, {0}, {2}));
  fake_cuda::break_stream(false);
  CHECK(result.status == Status::kFailed);
  CHECK(result.reason.find("illegal memory access") != std::string::npos);

  *world.pool->slot(1) ^= std::byte{1};  // damages the page in slot 1
  result = world.run(world.op(OpKind::kH2D, {4, 5}, {0, 1}));
  CHECK(result.status == Status::kFailed);
  CHECK(result.failed == std::vector<int32_t>{1});
  CHECK(result.reason.find("digest mismatch in run 0 (layer 0) of slot 1") != std::string::npos);
  CHECK(world.holds(4, 1));
  CHECK_FALSE(world.holds(5, 2));

  result = world.run(world.op(OpKind::kH2D, {6}, {0}));
  CHECK(result.status == Status::kOk);
  CHECK(world.holds(6, 1));
}

TEST_CASE("cuda lane: graphs name the engine's stream, and engines without streams refuse one") {
  CudaWorld world({}, {}, {});
  GraphSpec graph;
  graph.ops.push_back(world.op(OpKind::kD2H, {0}, {0}));
  CHECK_THROWS_AS(world.engine->submit(graph), ContractError);
  CHECK_THROWS_AS(cuda::Device::open(1, world.loaded.driver), ConfigError);
}

TEST_CASE("cuda lane: close with copies in flight waits for them") {
  CudaWorld world({}, {}, {});
  world.fill(0, 4);
  fake_cuda::hold_all(true);
  const int64_t before = fake_cuda::calls().records;
  world.submit(world.op(OpKind::kD2H, {0}, {0}));
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (fake_cuda::calls().records < before + 2 && seconds_until(deadline) > 0) std::this_thread::yield();
  CHECK_FALSE(world.engine->close(0.05));
  fake_cuda::hold_all(false);
  CHECK(world.engine->close(CudaWorld::kLongS));
  CHECK(world.slot_holds(0, 4));
  CHECK(world.engine->poll(1).front().status == Status::kOk);
}

namespace {

// Loads 20 pages of 2 MiB while all streams are held. If `cancels` is true, cancels the load, which drops the
// pages that are not in flight. Then the engine writes to the blocks of those pages, and the streams are
// released. Returns whether the engine's bytes stayed unchanged.
bool reused_blocks_stay(bool cancels) {
  CudaShape shape;
  shape.layers = 2;
  shape.run_bytes = 1 << 20;
  shape.blocks = 40;
  shape.extent_slots = 40;
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  std::vector<int32_t> slots;
  std::vector<int32_t> blocks;
  for (int32_t i = 0; i < 20; ++i) {
    slots.push_back(i);
    blocks.push_back(20 + i);
    world.fill(i, i + 1);
  }
  CHECK(world.run(world.op(OpKind::kD2H, slots, slots)).status == Status::kOk);
  const int64_t before = fake_cuda::calls().bytes;
  fake_cuda::hold_all(true);
  const int64_t ticket = world.submit(world.op(OpKind::kH2D, blocks, slots));
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (fake_cuda::calls().bytes - before < 2 * cuda::kPortionBytes[0] && seconds_until(deadline) > 0) {
    std::this_thread::yield();
  }
  constexpr int32_t kInFlight = 2 * cuda::kPortionBytes[0] / (2 << 20);
  std::vector<int32_t> dropped;
  for (int32_t i = kInFlight; i < 20; ++i) dropped.push_back(i);
  if (cancels) world.engine->cancel(ticket);
  // Pages in flight may still be written, so the load has no result yet.
  CHECK_FALSE(world.engine->wait(ticket, 0.05));
  CHECK(world.engine->poll(1).empty());
  for (const int32_t i : dropped) world.fill(20 + i, 90 + i);
  fake_cuda::hold_all(false);
  REQUIRE(world.engine->wait(ticket, CudaWorld::kLongS));
  const OpResult result = world.engine->poll(1).front();
  CHECK(result.failed == (cancels ? dropped : std::vector<int32_t>{}));
  for (int32_t i = 0; i < kInFlight; ++i) CHECK(world.holds(20 + i, i + 1));
  CHECK(world.run(world.op(OpKind::kH2D, {20}, {5})).status == Status::kOk);
  CHECK(world.holds(20, 6));
  return std::all_of(dropped.begin(), dropped.end(), [&](int32_t i) { return world.holds(20 + i, 90 + i); });
}

}  // namespace

TEST_CASE("cuda lane: cancelled in flight, the dropped pages' blocks are the engine's at once") {
  CHECK(reused_blocks_stay(true));
  CHECK_FALSE(reused_blocks_stay(false));
}

TEST_CASE("cuda lane: tables of several kernels in flight are apart, and nothing is freed for them") {
  CudaShape shape;
  shape.layers = 9000;  // tables of 288 KB
  shape.run_bytes = 1;
  CudaWorld world(shape, {}, {.batch = true, .kernel = true});
  world.fill(0, 1);
  world.fill(1, 2);
  CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
  fake_cuda::hold_all(true);
  const int64_t launched = fake_cuda::calls().kernel;
  // Two ops in the same direction. The tables of both ops are in the memory of their stream.
  const int64_t first = world.submit(world.op(OpKind::kD2H, {0}, {1}));
  const int64_t second = world.submit(world.op(OpKind::kD2H, {1}, {2}));
  const int64_t load = world.submit(world.op(OpKind::kH2D, {4, 5}, {0, 0}));
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (fake_cuda::calls().kernel < launched + 3 && seconds_until(deadline) > 0) std::this_thread::yield();
  // Control: the fake records a broken rule if memory is freed at this point.
  void* memory = nullptr;
  const cuda::Current here(*world.device);
  REQUIRE(world.device->driver().host_alloc(&memory, 64, 0) == cuda::kSuccess);
  CHECK_FALSE(fake_cuda::take_violation("memory freed while work is in flight"));
  world.device->driver().host_free(memory);
  CHECK(fake_cuda::take_violation("memory freed while work is in flight"));
  fake_cuda::hold_all(false);
  for (const int64_t ticket : {first, second, load}) CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world.slot_holds(1, 1));
  CHECK(world.slot_holds(2, 2));
  CHECK(world.holds(5, 1));
}

TEST_CASE("cuda lane: a launch whose tables find no room beside another's goes by the copy engine") {
  CudaShape shape;
  shape.layers = 20000;  // tables of 640 KB each; all tables together have 1 MiB
  shape.run_bytes = 1;
  CudaWorld world(shape, {}, kAll);
  world.fill(0, 1);
  world.fill(1, 2);
  const int64_t kernels = fake_cuda::calls().kernel, batches = fake_cuda::calls().batch;
  fake_cuda::hold_all(true);
  const int64_t first = world.submit(world.op(OpKind::kD2H, {0}, {1}));
  const int64_t second = world.submit(world.op(OpKind::kD2H, {1}, {2}));
  CHECK(comes_true([&] { return fake_cuda::calls().batch > batches; }));
  CHECK(fake_cuda::calls().kernel == kernels + 1);
  fake_cuda::hold_all(false);
  for (const int64_t ticket : {first, second}) CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world.slot_holds(1, 1));
  CHECK(world.slot_holds(2, 2));
}
