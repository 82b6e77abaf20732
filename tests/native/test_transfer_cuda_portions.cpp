// How the CUDA lane cuts pages into pieces over a fake driver: how many are under way, and of how many bytes.
// Nothing here ran on a GPU.
#include <doctest/doctest.h>

#include <thread>

#include "cuda/copier.h"
#include "cuda_world.h"

using namespace flexkv;

namespace {

// Unit: bytes. What an idle lane enqueues of `spec` while nothing enqueued moves.
int64_t bytes_under_way(CudaWorld& world, const OpSpec& spec, int64_t expected) {
  const int64_t before = fake_cuda::calls().bytes;
  fake_cuda::hold_all(true);
  const int64_t ticket = world.submit(spec);
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (fake_cuda::calls().bytes - before < expected && seconds_until(deadline) > 0) {
    std::this_thread::yield();
  }
  CHECK_FALSE(world.engine->wait(ticket, 0.05));
  const int64_t bytes = fake_cuda::calls().bytes - before;
  fake_cuda::hold_all(false);
  REQUIRE(world.engine->wait(ticket, CudaWorld::kLongS));
  CHECK(world.engine->poll(1).front().status == Status::kOk);
  return bytes;
}

// Pages of 20 MiB, by some layers or by one.
CudaShape large_pages(int32_t layers) {
  CudaShape shape;
  shape.layers = layers;
  shape.run_bytes = (int64_t{20} << 20) / layers;
  shape.blocks = 4;
  shape.extent_slots = 2;
  shape.digests = true;
  return shape;
}

}  // namespace

TEST_CASE("cuda lane: at most two pieces of a direction are under way, and their bytes are bounded") {
  CudaShape shape;
  shape.layers = 2;
  shape.run_bytes = 1 << 20;
  shape.blocks = 40;
  shape.extent_slots = 40;
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  const int64_t before = fake_cuda::calls().bytes;
  fake_cuda::hold_all(true);
  std::vector<int32_t> all;
  for (int32_t i = 0; i < shape.blocks; ++i) all.push_back(i);
  const int64_t ticket = world.submit(world.op(OpKind::kD2H, all, all));
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (fake_cuda::calls().bytes - before < 2 * kSubBatchBytes && seconds_until(deadline) > 0) {
    std::this_thread::yield();
  }
  CHECK_FALSE(world.engine->wait(ticket, 0.05));
  CHECK(fake_cuda::calls().bytes - before == 2 * kSubBatchBytes);
  fake_cuda::hold_all(false);
  CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
}

TEST_CASE("cuda lane: a page beyond 8 MiB moves in ranges of layers, and a layer beyond it in portions") {
  for (const int32_t layers : {20, 5, 1}) {
    for (const bool layerwise : {false, true}) {
      CAPTURE(layers);
      CAPTURE(layerwise);
      const CudaShape shape = large_pages(layers);
      CudaWorld world(shape, {}, {.batch = true, .kernel = false});
      for (int32_t block = 0; block < shape.blocks; ++block) world.fill(block, block + 1);
      // Two pages at once for a range of layers; one page gives a lane with several portions both places.
      const int64_t per_piece = kSubBatchBytes / shape.run_bytes * shape.run_bytes;
      const int64_t most =
          2 * (layers == 1 ? cuda::portion_bytes(shape.run_bytes, kSubBatchBytes) : per_piece);
      CHECK(bytes_under_way(world, world.op(OpKind::kD2H, {0, 1}, {3, 0}), most) == most);
      CHECK(world.slot_holds(3, 1));
      CHECK(world.slot_holds(0, 2));
      // Layer 0 of both pages is all that a layerwise op may have under way.
      const int64_t first = layerwise && layers > 1 ? 2 * shape.run_bytes : most;
      CHECK(bytes_under_way(world, world.op(OpKind::kH2D, {2, 3}, {3, 0}, layerwise), first) == first);
      for (int32_t block = 0; block < shape.blocks; ++block) CHECK(world.holds(block, block % 2 + 1));
    }
  }
}

TEST_CASE("cuda lane: control: a page given to the copier at once is all under way") {
  const CudaShape shape = large_pages(20);
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  const cuda::Current here(*world.device);
  cuda::Copier copier(world.device, nullptr, {});
  const int64_t before = fake_cuda::calls().bytes;
  const cuda::PageEnds page{0, world.pool->slot_address(0)};
  const std::string error =
      copier.enqueue(cuda::Direction::kToHost, world.view->segments(), std::span(&page, 1), true, 0,
                     reinterpret_cast<cuda::StreamHandle>(world.stream));
  CHECK(error.empty());
  CHECK(fake_cuda::calls().bytes - before == int64_t{20} << 20);
  fake_cuda::drain(world.stream);
}

TEST_CASE("cuda lane: a large page that fails halfway is failed by name, and the next transfer works") {
  for (const int32_t layers : {20, 1}) {
    const CudaShape shape = large_pages(layers);
    CudaWorld world(shape, {}, {.batch = true, .kernel = false});
    world.fill(0, 1);
    fake_cuda::fail_copy(1);
    const OpResult result = world.run(world.op(OpKind::kD2H, {0}, {0}));
    CHECK(result.status == Status::kFailed);
    CHECK(result.failed == std::vector<int32_t>{0});
    CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
    CHECK(world.slot_holds(0, 1));
  }
}
