// Tests the digests of the CUDA lane, which several threads compute and check. These tests use the fake
// driver and need no GPU.
#include <doctest/doctest.h>

#include <string>

#include "base/digest.h"
#include "cuda_world.h"
#include "soak.h"
#include "thread_watch.h"

using namespace flexkv;

namespace {

const char* const kName = "flexkv-digest";

CudaShape odd_pages() {
  CudaShape shape;
  shape.layers = 5;
  shape.run_bytes = 700'001;  // pages of 3.5 MB: an item has two pages, and a run has two parts
  shape.blocks = 8;
  shape.digests = true;
  return shape;
}

// Pages of one layer of 20 MiB, which is enqueued in portions.
CudaShape large_layers() {
  CudaShape shape;
  shape.layers = 1;
  shape.run_bytes = int64_t{20} << 20;
  shape.blocks = 4;
  shape.extent_slots = 2;
  shape.digests = true;
  return shape;
}

std::unique_ptr<CudaWorld> world_with(const CudaShape& shape, std::unique_ptr<DigestCrew> digests) {
  const cuda::CopySwitches switches{.batch = true, .kernel = false};
  return std::make_unique<CudaWorld>(shape, fake_cuda::Settings{}, switches, -1, std::move(digests));
}

uint64_t* digests_of(const CudaWorld& world, int32_t slot) {
  return reinterpret_cast<uint64_t*>(world.pool->slot_address(slot) +
                                     round_up(world.view->stripe_bytes(), kIoAlignBytes));
}

bool digests_are_right(const CudaWorld& world, int32_t slot) {
  for (size_t i = 0; i < world.view->runs().size(); ++i) {
    const Segment& run = world.view->runs()[i];
    const std::byte* bytes = world.pool->slot_address(slot) + run.page_offset;
    if (digests_of(world, slot)[i] != run_digest_scalar(bytes, static_cast<size_t>(run.run_bytes))) {
      return false;
    }
  }
  return true;
}

// Stores two pages and loads them, first unchanged and then with one changed byte in each layer in turn.
void store_and_load(CudaWorld& world, bool layerwise) {
  for (int32_t block = 0; block < 4; ++block) world.fill(block, block + 1);
  for (const int32_t slot : {3, 0}) digests_of(world, slot)[0] = 1;
  REQUIRE(world.run(world.op(OpKind::kD2H, {0, 1}, {3, 0})).status == Status::kOk);
  CHECK(world.slot_holds(3, 1));
  CHECK(world.slot_holds(0, 2));
  CHECK(digests_are_right(world, 3));
  CHECK(digests_are_right(world, 0));
  CHECK(world.run(world.op(OpKind::kH2D, {2, 3}, {3, 0}, layerwise)).status == Status::kOk);
  CHECK(world.holds(2, 1));
  CHECK(world.holds(3, 2));
  const int32_t last = world.shape_.layers - 1;
  for (int32_t layer = last; layer >= 0; --layer) {
    world.pool->slot_address(0)[layer * world.shape_.run_bytes + world.shape_.run_bytes / 2] ^= std::byte{8};
    world.fill(2, 9);
    world.fill_layer(0, 3, 8);
    const OpResult result = world.run(world.op(OpKind::kH2D, {2, 3}, {3, 0}, layerwise));
    CHECK(result.status == Status::kFailed);
    CHECK(result.failed == std::vector<int32_t>{1});
    CHECK(result.reason.find("digest mismatch in run " + std::to_string(layer) + " (layer " +
                             std::to_string(layer) + ") of slot 0") != std::string::npos);
    CHECK(world.holds(2, 1));
    if (!layerwise || layer == 0) CHECK(world.layer_holds(0, 3, 8));  // no byte of the bad page was loaded
  }
}

}  // namespace

TEST_CASE("cuda digests: any number of threads makes and checks them, and names the first bad run") {
  for (const int32_t threads : kThreadSanitizer ? std::vector{2, 5} : std::vector{1, 2, 5, 16}) {
    CAPTURE(threads);
    for (const CudaShape& shape : {odd_pages(), large_layers()}) {
      for (const bool layerwise : {false, true}) {
        CAPTURE(layerwise);
        const auto world = world_with(shape, std::make_unique<DigestCrew>(threads));
        store_and_load(*world, layerwise);
        CHECK(threads_named(kName) == threads - 1);
      }
      CHECK(come_to(0, kName));  // the lane's destructor has joined its threads
    }
  }
}

TEST_CASE("cuda digests: threads beside those of the lane take part in both directions") {
  Meeting checking(3), writing(3);
  const auto world = world_with(odd_pages(), std::make_unique<DigestCrew>(3, [&](DigestWork work) {
                                  (work == DigestWork::kCheck ? checking : writing).come();
                                }));
  store_and_load(*world, false);
  CHECK(checking.came() == 3);
  CHECK(writing.came() == 3);
}

TEST_CASE("cuda digests: without digests there is no thread for them") {
  CudaShape shape = odd_pages();
  shape.digests = false;
  bool called = false;
  const auto world = world_with(shape, std::make_unique<DigestCrew>(16, [&](DigestWork) { called = true; }));
  world->fill(0, 1);
  CHECK(world->run(world->op(OpKind::kD2H, {0, 1}, {3, 0})).status == Status::kOk);
  CHECK(world->run(world->op(OpKind::kH2D, {2, 3}, {3, 0})).status == Status::kOk);
  CHECK(world->holds(2, 1));
  CHECK(threads_named(kName) == 0);
  CHECK_FALSE(called);
}

TEST_CASE("cuda digests: where no thread can be started the lane's own make and check them") {
  const CudaShape shape = odd_pages();
  const auto world = world_with(shape, std::make_unique<DigestCrew>(4));
  // An op without digests starts the lane's threads but no digest threads.
  world->engine->detach_view(0);
  world->engine->attach_view(0, world->view, world->pool, 0, kNoDigests);
  REQUIRE(world->run(world->op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
  world->engine->detach_view(0);
  world->engine->attach_view(0, world->view, world->pool, 0,
                             round_up(world->view->stripe_bytes(), kIoAlignBytes));
  {
    const NoMoreThreads none;
    REQUIRE(NoMoreThreads::refuses());
    store_and_load(*world, false);
    CHECK(threads_named(kName) == 0);
  }
  store_and_load(*world, true);
  CHECK(threads_named(kName) == 3);
}

TEST_CASE("cuda digests: a lane that is abandoned leaves no thread for them behind") {
  const auto world = world_with(odd_pages(), std::make_unique<DigestCrew>(4));
  store_and_load(*world, false);
  CHECK(threads_named(kName) == 3);
  world->lane->abandon();
  for (const char* name : {kName, "flexkv-h2d", "flexkv-d2h"}) CHECK(come_to(0, name));
}
