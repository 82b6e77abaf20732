// Tests calls that the CUDA driver refuses: no exception ends a thread, the lane reports failed items, and
// copies take another path if there is one. These tests use the fake driver and need no GPU.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/error.h"
#include "cuda/copy_stream.h"
#include "cuda/event.h"
#include "cuda_world.h"

using namespace flexkv;

namespace {

struct NoFence : StreamEvent {
  std::string make_wait(StreamId) override { return {}; }
  bool reached() override { return true; }
};

// Runs a store while the driver refuses the next `count` calls that make the context current. Returns the
// store's result.
OpResult run_with_refused_threads(int64_t count) {
  CudaWorld world({}, {}, {});
  GraphSpec graph;
  graph.ops.push_back(world.op(OpKind::kD2H, {0, 1}, {0, 1}));
  graph.fence = world.engine->record(world.stream);  // so that submit() itself pushes no context
  fake_cuda::refuse("cuCtxPushCurrent", count);
  const auto ticket = world.engine->submit(std::move(graph), world.stream);
  REQUIRE(ticket);
  REQUIRE(world.engine->wait(*ticket, CudaWorld::kLongS));
  fake_cuda::refuse("cuCtxPushCurrent", 0);
  return world.engine->poll(1).front();
}

}  // namespace

TEST_CASE("cuda refusals: threads without the device's context fail their items by name") {
  const OpResult result = run_with_refused_threads(fake_cuda::kAlways);
  CHECK(result.status == Status::kFailed);
  CHECK(result.failed == std::vector<int32_t>{0, 1});
  CHECK(result.reason.find("cuCtxPushCurrent") != std::string::npos);
  CHECK(run_with_refused_threads(0).status == Status::kOk);  // control: no call is refused
}

TEST_CASE("cuda refusals: memory whose registration has no context is told as refused") {
  CudaWorld world({}, {}, {});
  const auto pool = HostPool::create({kIoAlignBytes, 8, 2 * kIoAlignBytes}, {});
  REQUIRE(pool->wait_ready(8, CudaWorld::kLongS));
  fake_cuda::refuse("cuCtxPushCurrent", fake_cuda::kAlways);
  pool->pin(cuda::make_registrar(world.device), {.tries = 0});
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (pool->registration_error().empty() && seconds_until(deadline) > 0) std::this_thread::yield();
  fake_cuda::refuse("cuCtxPushCurrent", 0);
  CHECK(pool->registration_error().find("cuCtxPushCurrent") != std::string::npos);
  CHECK(pool->pinned_slots() == 8);
  CHECK_FALSE(pool->registered(0));
}

TEST_CASE("cuda refusals: only a stream that is captured is called so") {
  CudaWorld world({}, {}, {});
  const auto event = world.lane->record(world.stream);
  constexpr cuda::Code kBroken = 700;
  for (int i = 0; i < 2; ++i) {
    CAPTURE(i);
    const auto touch = [&] {
      if (i == 0) {
        world.lane->record(world.stream);
      } else {
        world.lane->make_wait(*event, world.stream);
      }
    };
    fake_cuda::refuse("cuStreamIsCapturing", 1, kBroken);
    CHECK_THROWS_AS(touch(), CapacityError);
    fake_cuda::refuse("cuStreamIsCapturing", 1, cuda::kErrorCaptureImplicit);
    CHECK_THROWS_AS(touch(), ContractError);
    CHECK_NOTHROW(touch());
  }
}

TEST_CASE("cuda refusals: more runs than a kernel's tables have room for go by the copy engine") {
  for (const int32_t layers : {9000, 40000}) {
    CudaShape shape;
    shape.layers = layers;
    shape.run_bytes = 1;
    CudaWorld world(shape, {}, kAll);
    const cuda::Copier& copier = world.lane->copier();
    world.fill(0, 3);
    CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);
    CHECK(world.slot_holds(0, 3));
    CHECK(copier.count(cuda::Path::kKernel).pieces == (layers == 9000 ? 1 : 0));
    CHECK((copier.count(cuda::Path::kBatch).pieces > 0) == (layers == 40000));
    CHECK(copier.failed_launches() == 0);
    CHECK(copier.notes().empty());
  }
}

TEST_CASE("cuda refusals: pages of a stream that fails are failed, however its ends are seen") {
  for (const bool words_refused : {false, true}) {
    for (const bool no_marks : {false, true}) {
      CAPTURE(words_refused);
      CAPTURE(no_marks);
      CudaShape shape;
      shape.digests = true;
      CudaWorld world(shape, {.words_refused = words_refused}, {.batch = true, .kernel = false});
      std::vector<int64_t> tickets;
      fake_cuda::break_stream(true);
      fake_cuda::hold_all(true);
      for (int32_t i = 0; i < 2; ++i) tickets.push_back(world.submit(world.op(OpKind::kD2H, {i}, {i})));
      const auto deadline = deadline_in(CudaWorld::kLongS);
      while (fake_cuda::calls().bytes < 2 * 3 * 1024 && seconds_until(deadline) > 0)
        std::this_thread::yield();
      if (no_marks) {
        fake_cuda::refuse("cuStreamWriteValue32", fake_cuda::kAlways);
        fake_cuda::refuse("cuEventRecord", fake_cuda::kAlways);
      }
      fake_cuda::hold_all(false);
      GraphSpec later;
      later.ops.push_back(world.op(OpKind::kD2H, {2}, {2}));
      later.fence = std::make_shared<NoFence>();
      const auto third = world.engine->submit(std::move(later), world.stream);
      REQUIRE(third);
      tickets.push_back(*third);
      for (const int64_t ticket : tickets) REQUIRE(world.engine->wait(ticket, CudaWorld::kLongS));
      for (const OpResult& result : world.engine->poll(3)) CHECK(result.status == Status::kFailed);
      fake_cuda::break_stream(false);
      fake_cuda::refuse("cuEventRecord", 0);
    }
  }
}

TEST_CASE("cuda refusals: marks go round, and no kernel takes a word of nobody's for its stop") {
  fake_cuda::reset();
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  {
    const auto device = cuda::Device::open(0, loaded.driver);
    const cuda::Current here(*device);
    cuda::Copier copier(device, fake_cuda::copy_kernels(), kAll);
    cuda::CopyStream stream(device, false, UINT32_MAX - 4);
    std::vector<std::byte> pool(4096, std::byte{9}), host(4096);
    const Segment segment{reinterpret_cast<uintptr_t>(pool.data()), 4096, 4096, 0, 0};
    const cuda::PageEnds page{0, host.data()};
    for (int i = 0; i < 40; ++i) {
      CAPTURE(i);
      std::fill(host.begin(), host.end(), std::byte{0});
      const uint32_t mark = stream.next_mark();
      CHECK(mark != 0);
      CHECK_FALSE(stream.reached(mark));
      const bool stopped = i % 3 == 0;
      if (stopped) {
        CHECK(stream.stop(mark).empty());
        fake_cuda::settle();
      }
      REQUIRE(copier.launch(cuda::Direction::kToHost, std::span(&segment, 1), std::span(&page, 1), stream));
      REQUIRE(stream.mark().empty());
      const auto deadline = deadline_in(CudaWorld::kLongS);
      while (!stream.reached(mark) && seconds_until(deadline) > 0) std::this_thread::yield();
      CHECK((host == pool) == !stopped);
      if (stopped) stream.forget_stop(mark);
      fake_cuda::settle();
    }
  }
  for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
}
