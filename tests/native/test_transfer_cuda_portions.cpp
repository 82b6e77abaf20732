// Tests how many bytes the CUDA lane has in flight, and by which path it copies them. The fake driver counts
// the bytes; these tests need no GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <thread>

#include "cuda/copy_ways.h"
#include "cuda_forward.h"
#include "cuda_world.h"
#include "thread_watch.h"

using namespace flexkv;

namespace {

constexpr size_t kLoads = 0, kStores = 1;
constexpr cuda::CopySwitches kBatches{.batch = true, .kernel = false};

std::vector<int32_t> all_of(const CudaShape& shape) {
  std::vector<int32_t> all(static_cast<size_t>(shape.blocks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Unit: bytes. The maximum that the copy engine has in flight in one direction.
int64_t most_in_flight(size_t direction) {
  return static_cast<int64_t>(cuda::kPortionsInFlight[direction]) * cuda::kPortionBytes[direction];
}

// Stores all blocks, loads them into the blocks in reverse order, and returns what the fake driver counted.
fake_cuda::Calls there_and_back(const CudaShape& shape, const cuda::CopySwitches& switches,
                                bool layerwise = false) {
  CudaWorld world(shape, {}, switches);
  for (int32_t block = 0; block < shape.blocks; ++block) world.fill(block, block + 1);
  const std::vector<int32_t> all = all_of(shape);
  const fake_cuda::Calls tried = fake_cuda::calls();
  CHECK(world.run(world.op(OpKind::kD2H, all, all, layerwise)).status == Status::kOk);
  const std::vector<int32_t> reversed(all.rbegin(), all.rend());
  CHECK(world.run(world.op(OpKind::kH2D, reversed, all, layerwise)).status == Status::kOk);
  for (int32_t block = 0; block < shape.blocks; ++block) CHECK(world.holds(block, shape.blocks - block));
  fake_cuda::Calls calls = fake_cuda::calls();
  calls.kernel -= tried.kernel;
  calls.batch -= tried.batch;
  return calls;
}

}  // namespace

TEST_CASE("cuda portions: by kernel an op is one launch, on two multiprocessors or one") {
  const CudaShape shape{.layers = 8, .blocks = 64, .run_bytes = 4096, .extent_slots = 64};
  const fake_cuda::Calls calls = there_and_back(shape, kAll);
  CHECK(calls.kernel == 2);  // one launch of 2 MiB in each direction
  CHECK(calls.batch == 0);
  CHECK(calls.multiprocessors[kLoads] == 2);
  CHECK(calls.multiprocessors[kStores] == 1);
}

TEST_CASE("cuda portions: the kernel stores long runs, too, and the copy engine loads them") {
  const CudaShape shape{.layers = 2, .blocks = 6, .run_bytes = 1 << 20, .extent_slots = 6};
  const fake_cuda::Calls calls = there_and_back(shape, kAll);
  CHECK(calls.kernel == 2);  // launches of 4 and 8 MiB
  CHECK(calls.batch == 3);
  CHECK(calls.peak_long_stores == 0);
}

TEST_CASE("cuda portions: a large op is few launches, the first a small one") {
  const CudaShape shape{.layers = 8, .blocks = 640, .run_bytes = 16384, .extent_slots = 640};  // 80 MiB
  const fake_cuda::Calls calls = there_and_back(shape, kAll);
  CHECK(calls.kernel == 2 * 3);  // launches of 4, 64 and 12 MiB in each direction
}

TEST_CASE("cuda portions: two launches are in flight in a direction, and further items wait for their turn") {
  CudaWorld world({}, {}, kAll);
  const auto most = static_cast<int64_t>(cuda::kLaunchesInFlight);
  for (const OpKind kind : {OpKind::kD2H, OpKind::kH2D}) {
    std::vector<int64_t> tickets;
    const int64_t before = fake_cuda::calls().kernel;
    {
      Forward forward(world, [] {});
      for (int32_t i = 0; i < 5; ++i) tickets.push_back(world.submit(world.op(kind, {i}, {i})));
      CHECK(comes_true([&] { return fake_cuda::calls().kernel - before >= most; }));
      CHECK_FALSE(world.engine->wait(tickets.front(), kAWhileS));  // enough time for more launches
      CHECK(fake_cuda::calls().kernel - before == most);
    }
    for (const int64_t ticket : tickets) CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
    CHECK(fake_cuda::calls().peak_kernels[kind == OpKind::kH2D ? kLoads : kStores] == most);
  }
}

TEST_CASE("cuda portions: the copy engine has a few portions in flight, and no long copy to the host") {
  const CudaShape shape{.layers = 4, .blocks = 96, .run_bytes = 64 << 10, .extent_slots = 96};
  const fake_cuda::Calls calls = there_and_back(shape, kBatches);
  CHECK(calls.batch == 6 + 12);  // 24 MiB in each direction
  for (const size_t direction : {kLoads, kStores}) {
    CHECK(calls.peak_bytes[direction] <= most_in_flight(direction));
    CHECK(calls.most_batch_bytes[direction] <= cuda::kPortionBytes[direction]);
  }
  CHECK(calls.longest_copy[kStores] <= cuda::kStoreCopyBytes);
  CHECK(calls.longest_copy[kLoads] == shape.run_bytes);
  CHECK(calls.peak_long_stores == 0);
  CHECK(calls.largest_batch <= static_cast<int64_t>(cuda::kPortionCopies));
}

TEST_CASE("cuda portions: long runs to the host are cut") {
  const CudaShape shape{.layers = 4, .blocks = 6, .run_bytes = 1 << 20, .extent_slots = 6};
  const fake_cuda::Calls calls = there_and_back(shape, kBatches);
  CHECK(calls.batch == 6 + 12);
  CHECK(calls.longest_copy[kStores] == cuda::kStoreCopyBytes);
  CHECK(calls.peak_long_stores == 0);
}

TEST_CASE("cuda portions: long copies to the host are cut without batches, too") {
  const CudaShape shape{.layers = 1, .blocks = 6, .run_bytes = 3 << 20, .extent_slots = 1};
  const fake_cuda::Calls calls = there_and_back(shape, kSingle);
  CHECK(calls.peak_long_stores == 0);
  CHECK(calls.longest_copy[kStores] == cuda::kStoreCopyBytes);
  CHECK(calls.peak_bytes[kStores] <= most_in_flight(kStores));
  CHECK(calls.peak_bytes[kLoads] <= most_in_flight(kLoads));
}

TEST_CASE("cuda portions: without batches neighbours to the host are not joined to a long copy") {
  const CudaShape shape{
      .layers = 1, .blocks = 24, .run_bytes = 64 << 10, .extent_slots = 24, .exact_slots = true};
  CudaWorld world(shape, {}, kSingle);
  CHECK(world.run(world.op(OpKind::kD2H, all_of(shape), all_of(shape))).status == Status::kOk);
  CHECK(fake_cuda::calls().longest_copy[kStores] == cuda::kStoreCopyBytes);
  // Control: the blocks are contiguous, so the copies of loads are joined.
  CHECK(world.run(world.op(OpKind::kH2D, all_of(shape), all_of(shape))).status == Status::kOk);
  CHECK(fake_cuda::calls().longest_copy[kLoads] > cuda::kStoreCopyBytes);
}

TEST_CASE("cuda portions: control: two long copies given to the copier at once are both in flight") {
  const CudaShape shape{.layers = 1, .blocks = 4, .run_bytes = 3 << 20, .extent_slots = 1};
  CudaWorld world(shape, {}, kSingle);
  const cuda::Current here(*world.device);
  cuda::Copier copier(world.device, {}, kSingle);
  cuda::CopyStream stream(world.device, false);
  fake_cuda::hold_all(true);
  const std::vector<cuda::PageEnds> pages{{0, world.pool->slot_address(0), 0},
                                          {1, world.pool->slot_address(1), 1}};
  cuda::CopyLister lister(world.view->segments(), pages, INT64_MAX);
  std::vector<cuda::Copy> copies;
  while (lister.next(4 << 20, 1, copies) > 0) {
    CHECK(copier.copy(cuda::Direction::kToHost, copies, true, stream).empty());
  }
  fake_cuda::hold_all(false);
  CHECK(fake_cuda::calls().peak_long_stores == 2);
}

TEST_CASE("cuda portions: a small copy of the engine's waits for three portions at most") {
  const CudaShape shape{.layers = 4, .blocks = 384, .run_bytes = 64 << 10, .extent_slots = 384};
  CudaWorld world(shape, {}, kBatches);
  const auto ahead_of_a_small_copy = [&](bool expedited) {
    fake_cuda::Calls calls;
    {
      Forward forward(world, [] {});
      const int64_t before = fake_cuda::calls().bytes;
      const int64_t ticket = world.submit(world.op(OpKind::kD2H, all_of(shape), all_of(shape)));
      const int64_t most = expedited ? int64_t{96} << 20 : most_in_flight(kStores);
      if (expedited) CHECK(world.engine->order_after(ticket, CudaWorld::kLongS, world.stream));
      CHECK(comes_true([&] { return fake_cuda::calls().bytes - before >= most; }));
      CHECK_FALSE(world.engine->wait(ticket, 0.05));
      calls = fake_cuda::calls();
      calls.bytes -= before;
      forward.let_go();
      CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
    }
    return calls;
  };
  CHECK(ahead_of_a_small_copy(false).bytes == most_in_flight(kStores));
  // If the next engine step waits for the copies anyway, the lane enqueues all of them at once.
  CHECK(ahead_of_a_small_copy(true).bytes == int64_t{96} << 20);
}

TEST_CASE("cuda portions: a page of layers or of one long one arrives whole, in either order") {
  for (const int32_t layers : {20, 5, 1}) {
    for (const bool layerwise : {false, true}) {
      for (const cuda::CopySwitches& switches : {kBatches, kSingle}) {
        CAPTURE(layers);
        CAPTURE(layerwise);
        const CudaShape shape{.layers = layers,
                              .blocks = 2,
                              .run_bytes = (int64_t{20} << 20) / layers,
                              .digests = true,
                              .extent_slots = 1};
        const fake_cuda::Calls calls = there_and_back(shape, switches, layerwise);
        CHECK(calls.peak_bytes[kStores] <= most_in_flight(kStores));
        CHECK(calls.peak_bytes[kLoads] <= most_in_flight(kLoads));
      }
    }
  }
}

TEST_CASE("cuda portions: a large page that fails halfway is failed by name, and the next transfer works") {
  for (const int32_t layers : {20, 1}) {
    const CudaShape shape{.layers = layers,
                          .blocks = 4,
                          .run_bytes = (int64_t{20} << 20) / layers,
                          .digests = true,
                          .extent_slots = 2};
    CudaWorld world(shape, {}, kBatches);
    world.fill(0, 1);
    fake_cuda::fail_copy(1);
    const OpResult result = world.run(world.op(OpKind::kD2H, {0}, {0}));
    CHECK(result.status == Status::kFailed);
    CHECK(result.failed == std::vector<int32_t>{0});
    CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
    CHECK(world.slot_holds(0, 1));
  }
}

TEST_CASE("cuda portions: by layer, each is on its way before the next one's turn, small ones together") {
  // One layer of the four pages has 512 KiB or 16 KiB.
  for (const int64_t run_bytes : {int64_t{128} << 10, int64_t{4} << 10}) {
    const CudaShape shape{.layers = 6, .blocks = 8, .run_bytes = run_bytes, .extent_slots = 8};
    CudaWorld world(shape, {}, kAll);
    for (int32_t block = 0; block < 4; ++block) world.fill(block, block + 1);
    CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2, 3}, {0, 1, 2, 3})).status == Status::kOk);
    const int64_t before = fake_cuda::calls().bytes;
    const int64_t kernels = fake_cuda::calls().kernel;
    Forward forward(world, [] {});
    const int64_t ticket = world.submit(world.op(OpKind::kH2D, {4, 5, 6, 7}, {0, 1, 2, 3}, true));
    if (run_bytes >= 64 << 10) {
      // Two layers are in flight, and the third one waits for its turn.
      CHECK(comes_true([&] { return fake_cuda::calls().bytes - before >= 2 * 4 * run_bytes; }));
      CHECK(world.engine->wait_layer_on(ticket, 1, CudaWorld::kLongS, world.stream).in_time);
      CHECK_FALSE(world.engine->wait_layer_on(ticket, 2, 0.05, world.stream).in_time);
      CHECK(fake_cuda::calls().bytes - before == 2 * 4 * run_bytes);
    } else {
      CHECK(world.engine->wait_layer_on(ticket, 5, CudaWorld::kLongS, world.stream).in_time);
      CHECK(fake_cuda::calls().kernel - kernels == 1);
    }
    forward.let_go();
    CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
    for (int32_t block = 4; block < 8; ++block) CHECK(world.holds(block, block - 3));
  }
}

TEST_CASE("cuda portions: by layer one kernel takes all layers of short runs, and forwards wait for each") {
  // One layer of the eight pages has 256 KiB. If each range of layers has its own kernel, a range has at
  // least two layers.
  const CudaShape shape{.layers = 8, .blocks = 16, .run_bytes = 32 << 10, .extent_slots = 16};
  for (const bool words : {true, false}) {
    CAPTURE(words);
    CudaWorld world(shape, {}, kAll);
    if (!words) {
      world.engine->close(CudaWorld::kLongS);
      world.lane = std::make_shared<cuda::CudaLane>(
          world.device, cuda::CopyKernels{.copy = fake_cuda::copy_kernels().copy}, kAll);
      world.make_engine(world.lane);
    }
    for (int32_t block = 0; block < 8; ++block) world.fill(block, block + 1);
    const std::vector<int32_t> slots = {0, 1, 2, 3, 4, 5, 6, 7};
    CHECK(world.run(world.op(OpKind::kD2H, slots, slots)).status == Status::kOk);
    const int64_t kernels = fake_cuda::calls().kernel, waits = fake_cuda::calls().word_waits;
    std::vector<int> right;
    {
      // The previous forward pass delays the kernels, because only two can be enqueued at once.
      std::optional<Forward> forward;
      if (words) forward.emplace(world, [] {});
      const int64_t ticket =
          world.submit(world.op(OpKind::kH2D, {8, 9, 10, 11, 12, 13, 14, 15}, slots, true));
      for (int32_t layer = 0; layer < shape.layers; ++layer) {
        CHECK(world.engine->wait_layer_on(ticket, layer, CudaWorld::kLongS, world.stream).in_time);
        fake_cuda::enqueue(world.stream, [&, layer] {
          bool all = true;
          for (int32_t block = 8; block < 16; ++block)
            all = all && world.layer_holds(layer, block, block - 7);
          right.push_back(all ? layer : -1);
        });
      }
    }
    fake_cuda::drain(world.stream);
    CHECK(right == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(fake_cuda::calls().kernel - kernels == (words ? 1 : 4));
    CHECK(fake_cuda::calls().word_waits - waits == (words ? 8 : 0));
    // Checks that each stage has the chunks of its layer. The copied bytes do not show this, because the fake
    // copies all chunks before it counts a stage.
    std::vector<int32_t> ends;
    for (int64_t layer = 1; words && layer <= shape.layers; ++layer) {
      ends.push_back(static_cast<int32_t>(layer * shape.run_bytes / cuda::kChunkBytes));
    }
    CHECK(fake_cuda::calls().stage_ends == ends);
  }
}

TEST_CASE("cuda portions: a load by layer whose kernel cannot be started goes by the copy engine") {
  const CudaShape shape{.layers = 8, .blocks = 16, .run_bytes = 32 << 10, .extent_slots = 16};
  CudaWorld world(shape, {}, kAll);
  for (int32_t block = 0; block < 8; ++block) world.fill(block, block + 1);
  const std::vector<int32_t> slots = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(world.run(world.op(OpKind::kD2H, slots, slots)).status == Status::kOk);
  fake_cuda::fail_launches(1);
  const int64_t waits = fake_cuda::calls().word_waits;
  const int64_t ticket = world.submit(world.op(OpKind::kH2D, {8, 9, 10, 11, 12, 13, 14, 15}, slots, true));
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    CHECK(world.engine->wait_layer_on(ticket, layer, CudaWorld::kLongS, world.stream).in_time);
  }
  CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
  for (int32_t block = 8; block < 16; ++block) CHECK(world.holds(block, block - 7));
  CHECK(fake_cuda::calls().word_waits == waits);
}

TEST_CASE("cuda portions: where the kernel that waits cannot be launched, a forward waits on the host") {
  const CudaShape shape{.layers = 8, .blocks = 16, .run_bytes = 32 << 10, .extent_slots = 16};
  for (const bool fails : {true, false}) {  // false: control
    CAPTURE(fails);
    CudaWorld world(shape, {}, kAll);
    const cuda::Copier& copier = world.lane->copier();
    for (int32_t block = 0; block < 8; ++block) world.fill(block, block + 1);
    const std::vector<int32_t> slots = {0, 1, 2, 3, 4, 5, 6, 7};
    const std::vector<int32_t> blocks = {8, 9, 10, 11, 12, 13, 14, 15};
    CHECK(world.run(world.op(OpKind::kD2H, slots, slots)).status == Status::kOk);
    if (fails) fake_cuda::refuse("the kernel that waits", fake_cuda::kAlways);
    fake_cuda::hold_all(true);
    const int64_t ticket = world.submit(world.op(OpKind::kH2D, blocks, slots, true));
    // A wait on the host ends at its deadline. A wait of the stream can be enqueued even if a kernel is
    // stuck.
    const double wait_s = fails ? 0.1 : CudaWorld::kLongS;
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      CHECK(world.engine->wait_layer_on(ticket, layer, wait_s, world.stream).in_time == !fails);
    }
    for (int32_t block = 8; block < 16; ++block) CHECK_FALSE(world.holds(block, block - 7));
    fake_cuda::hold_all(false);
    for (int32_t layer = 0; fails && layer < shape.layers; ++layer) {
      CHECK(world.engine->wait_layer_on(ticket, layer, CudaWorld::kLongS, world.stream).in_time);
      for (int32_t block = 8; block < 16; ++block) CHECK(world.layer_holds(layer, block, block - 7));
    }
    CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
    CHECK(copier.failed_launches() == (fails ? 1 : 0));  // the lane does not launch that kernel again
    CHECK((copier.notes().find("the kernel that waits for a layer is not used any more") !=
           std::string::npos) == fails);
    CHECK(copier.capabilities().kernel);
    // If the kernel that waits failed, the next load has kernels of one or two layers each, with an event
    // behind each kernel.
    const int64_t kernels = fake_cuda::calls().kernel;
    const int64_t next = world.submit(world.op(OpKind::kH2D, blocks, slots, true));
    CHECK(world.engine->wait_layer_on(next, 7, CudaWorld::kLongS, world.stream).in_time);
    CHECK(world.engine->wait(next, CudaWorld::kLongS));
    CHECK(fake_cuda::calls().kernel - kernels == (fails ? 4 : 1));
    fake_cuda::drain(world.stream);
  }
}

TEST_CASE("cuda portions: loads that forwards wait for go on in turns, layer by layer, on an urgent stream") {
  const CudaShape shape{.layers = 3, .blocks = 12, .run_bytes = 1 << 20, .extent_slots = 12};
  CudaWorld world(shape, {}, kBatches);
  const std::vector<int> priorities = fake_cuda::calls().priorities;
  CHECK(*std::min_element(priorities.begin(), priorities.end()) < 0);
  for (int32_t block = 0; block < 6; ++block) world.fill(block, block + 1);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5})).status == Status::kOk);
  int64_t first = 0, second = 0;
  {
    Forward forward(world, [] {});
    first = world.submit(world.op(OpKind::kH2D, {6, 7, 8}, {0, 1, 2}, true));
    CHECK(world.engine->wait_layer_on(first, 1, CudaWorld::kLongS, world.stream).in_time);
    second = world.submit(world.op(OpKind::kH2D, {9, 10, 11}, {3, 4, 5}, true));
  }
  // The second load's first layer is enqueued before the first load's last layer.
  CHECK(world.engine->wait(second, CudaWorld::kLongS));
  CHECK(world.engine->wait(first, CudaWorld::kLongS));
  for (int32_t block = 6; block < 12; ++block) CHECK(world.holds(block, block - 5));
}

TEST_CASE("cuda portions: stores go on beside loads that wait, and loads beside stores") {
  const CudaShape shape{.layers = 1, .blocks = 8, .run_bytes = kSubBatchBytes, .extent_slots = 1};
  CudaWorld world(shape, {}, kBatches);
  for (int32_t block = 0; block < 8; ++block) world.fill(block, block + 1);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1, 2, 3}, {0, 1, 2, 3})).status == Status::kOk);
  const auto before = world.engine->record(world.stream);
  for (const bool store_first : {false, true}) {
    Forward forward(world, [] {});
    GraphSpec free_graph;
    const std::vector<int32_t> blocks{4, 5, 6, 7};
    free_graph.ops.push_back(store_first ? world.op(OpKind::kH2D, {0, 1, 2, 3}, {0, 1, 2, 3})
                                         : world.op(OpKind::kD2H, blocks, blocks));
    free_graph.fence = before;  // this graph does not wait for the forward pass
    const int64_t waiting = world.submit(store_first ? world.op(OpKind::kD2H, blocks, blocks)
                                                     : world.op(OpKind::kH2D, {0, 1, 2, 3}, {0, 1, 2, 3}));
    const auto goes = world.engine->submit(std::move(free_graph), world.stream);
    REQUIRE(goes);
    CHECK(world.engine->wait(*goes, CudaWorld::kLongS));
    CHECK_FALSE(world.engine->wait(waiting, 0));
    forward.let_go();
    CHECK(world.engine->wait(waiting, CudaWorld::kLongS));
    world.engine->poll(8);
  }
}

TEST_CASE("cuda portions: a cancelled store's kernel is told to stop, and its pages end as cancelled") {
  const CudaShape shape{.layers = 4, .blocks = 64, .run_bytes = 4096, .extent_slots = 64};
  CudaWorld world(shape, {}, kAll);
  for (int32_t block = 0; block < 64; ++block) world.fill(block, block + 1);
  int64_t ticket = 0;
  {
    Forward forward(world, [] {});
    const int64_t kernels = fake_cuda::calls().kernel;
    ticket = world.submit(world.op(OpKind::kD2H, all_of(shape), all_of(shape)));
    CHECK(comes_true([&] { return fake_cuda::calls().kernel > kernels; }));
    const int64_t words = fake_cuda::calls().words;
    world.engine->cancel(ticket);
    // A separate stream writes the stop word before the kernel begins.
    CHECK(comes_true([&] { return fake_cuda::calls().words > words; }));
    CHECK_FALSE(world.engine->wait(ticket, 0.05));  // the kernel may still write its slots
  }
  REQUIRE(world.engine->wait(ticket, CudaWorld::kLongS));
  const OpResult result = world.engine->poll(1).front();
  CHECK(result.failed.size() == 64);
  CHECK(result.reason == "cancelled");
  CHECK_FALSE(world.slot_holds(63, 64));  // nothing was copied
  // The next store is not stopped.
  CHECK(world.run(world.op(OpKind::kD2H, {63}, {63})).status == Status::kOk);
  CHECK(world.slot_holds(63, 64));
}

TEST_CASE("cuda portions: nothing is polled when nothing is in flight") {
  CudaWorld world({}, {}, kAll);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {0, 1})).status == Status::kOk);
  const auto cpu_s = [] {
    timespec spent{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
  };
  const int64_t queries = fake_cuda::calls().queries;
  const double before = cpu_s();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double idle_s = cpu_s() - before;
  CHECK(fake_cuda::calls().queries == queries);
  CHECK(idle_s < 0.05);
  // Control: while a forward pass runs in front of a copy, the lane polls from time to time.
  {
    Forward forward(world, [] {});
    const int64_t ticket = world.submit(world.op(OpKind::kD2H, {0}, {0}));
    CHECK(comes_true([&] { return fake_cuda::calls().queries > queries; }));
    forward.let_go();
    CHECK(world.engine->wait(ticket, CudaWorld::kLongS));
  }
}

TEST_CASE("cuda portions: where the driver writes no words, events say what has ended") {
  for (const fake_cuda::Settings& settings :
       {fake_cuda::Settings{.words_refused = true}, fake_cuda::Settings{.words_lost = true}}) {
    const CudaShape shape{
        .layers = 4, .blocks = 24, .run_bytes = 1 << 20, .digests = true, .extent_slots = 24};
    CudaWorld world(shape, settings, kBatches);
    for (int32_t block = 0; block < 12; ++block) world.fill(block, block + 1);
    std::vector<int32_t> half(12);
    std::iota(half.begin(), half.end(), 0);
    CHECK(world.run(world.op(OpKind::kD2H, half, half)).status == Status::kOk);
    std::vector<int32_t> others(12);
    std::iota(others.begin(), others.end(), 12);
    CHECK(world.run(world.op(OpKind::kH2D, others, half, true)).status == Status::kOk);
    for (int32_t block = 0; block < 12; ++block) CHECK(world.holds(12 + block, block + 1));
  }
}
