// Tests that the engine can capture a CUDA graph while flexkv registers memory, allocates and copies. The
// capture must stay intact, and none of flexkv's calls may fail. These tests use the fake driver and need no
// GPU.
#include <doctest/doctest.h>

#include <thread>

#include "base/error.h"
#include "cuda/device_memory.h"
#include "cuda/event.h"
#include "cuda_world.h"

using namespace flexkv;

namespace {

// A second stream of the engine, which this thread captures in `mode`.
struct Capturing {
  explicit Capturing(int mode = cuda::kCaptureGlobal) : stream(fake_cuda::make_stream(false)) {
    fake_cuda::begin_capture(stream, mode);
  }
  ~Capturing() { fake_cuda::destroy_stream(stream); }
  bool end() const { return fake_cuda::end_capture(stream); }
  const uintptr_t stream;
};

void await_pinned(const HostPool& pool, int64_t slots) {
  const auto deadline = deadline_in(CudaWorld::kLongS);
  while (pool.pinned_slots() < slots && seconds_until(deadline) > 0) std::this_thread::yield();
  REQUIRE(pool.pinned_slots() == slots);
}

}  // namespace

TEST_CASE("cuda capture: start, registration and copies beside one leave it whole") {
  for (const bool kernel : {false, true}) {
    CudaWorld world({}, {}, {.batch = true, .kernel = kernel});
    world.fill(0, 3);
    const Capturing capturing;
    {
      // Does what flexkv does at start: makes a context, streams and host memory, and runs self-tests.
      const auto device = cuda::Device::open(0, world.loaded.driver);
      const cuda::CudaLane lane(device, fake_cuda::copy_kernels(), {});
      CHECK(lane.copier().notes().empty());
      const cuda::DeviceMemory memory(device, 4096);
      CHECK(memory.time_copies(true, 4096, 2) > 0);
      const auto pool = HostPool::create({kIoAlignBytes, 8, 2 * kIoAlignBytes}, {});
      REQUIRE(pool->wait_ready(8, CudaWorld::kLongS));
      pool->pin(cuda::make_registrar(device), {.tries = 0});
      await_pinned(*pool, 8);
      CHECK(pool->registered(7));
    }
    CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {0, 1})).status == Status::kOk);
    CHECK(world.run(world.op(OpKind::kH2D, {7}, {0}, true)).status == Status::kOk);
    CHECK(world.holds(7, 3));
    CHECK(capturing.end());
  }
}

TEST_CASE("cuda capture: control: a thread in the default mode fails its call and the capture") {
  CudaWorld world({}, {}, {});
  const cuda::Driver& driver = world.device->driver();
  std::vector<std::byte> memory(4096);
  for (const int mode : {cuda::kCaptureGlobal, cuda::kCaptureThreadLocal, cuda::kCaptureRelaxed}) {
    CAPTURE(mode);
    const Capturing capturing(mode);
    cuda::Code code = cuda::kSuccess;
    std::thread([&] {
      fake_cuda::set_device(0);
      code = driver.host_register(memory.data(), memory.size(), cuda::kHostRegisterPortable);
    }).join();
    CHECK((code == cuda::kSuccess) == (mode != cuda::kCaptureGlobal));
    CHECK(capturing.end() == (mode != cuda::kCaptureGlobal));
    if (code == cuda::kSuccess) {
      const cuda::Current here(*world.device);
      CHECK(driver.host_unregister(memory.data()) == cuda::kSuccess);
    }
  }
}

TEST_CASE("cuda capture: the calling thread keeps its mode and its context") {
  CudaWorld world({}, {.devices = 2}, {});
  std::thread([&] {
    CHECK(fake_cuda::current_device() == -1);
    const auto event = world.lane->record(world.stream);
    world.lane->make_wait(*event, world.stream);
    CHECK(fake_cuda::current_device() == -1);
    CHECK(fake_cuda::capture_mode() == cuda::kCaptureGlobal);
    {
      const cuda::Current here(*world.device);
      CHECK(fake_cuda::current_device() == 0);
      CHECK(fake_cuda::capture_mode() == cuda::kCaptureRelaxed);
    }
    CHECK(fake_cuda::current_device() == -1);
    CHECK(fake_cuda::capture_mode() == cuda::kCaptureGlobal);
    CHECK(cuda::bind_thread(*world.device).empty());  // sets context and mode of this thread
    CHECK(fake_cuda::current_device() == 0);
    CHECK(fake_cuda::capture_mode() == cuda::kCaptureRelaxed);
  }).join();
}

TEST_CASE("cuda capture: a stream that is captured is refused by name, and stays whole") {
  CudaWorld world({}, {}, {});
  const auto event = world.lane->record(world.stream);
  fake_cuda::begin_capture(world.stream);
  GraphSpec graph;
  graph.ops.push_back(world.op(OpKind::kD2H, {0}, {0}));
  CHECK_THROWS_WITH_AS(world.engine->submit(graph, world.stream),
                       "the engine's stream is being captured into a graph", ContractError);
  CHECK_THROWS_AS(world.lane->make_wait(*event, world.stream), ContractError);
  CHECK(fake_cuda::end_capture(world.stream));
  CHECK(world.run(world.op(OpKind::kD2H, {0}, {0})).status == Status::kOk);

  // Control: if flexkv's stream waits for an event of the captured stream, flexkv's stream becomes part of
  // the capture. If the captured stream waits for an event of flexkv's stream, the capture becomes invalid.
  fake_cuda::begin_capture(world.stream);
  {
    const cuda::Current here(*world.device);
    const cuda::Stream own(world.device);
    cuda::Event captured(world.device, reinterpret_cast<cuda::StreamHandle>(world.stream));
    CHECK(captured.make_wait(reinterpret_cast<StreamId>(own.handle())).empty());
    CHECK(fake_cuda::take_violation("drawn into the engine's capture"));
    CHECK_FALSE(cuda::Event(world.device, own.handle()).make_wait(world.stream).empty());
  }
  CHECK_FALSE(fake_cuda::end_capture(world.stream));
}

TEST_CASE("cuda contexts: only on the devices that were asked for") {
  fake_cuda::reset({.devices = 2});
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  {
    const auto device = cuda::Device::open(1, loaded.driver);
    std::thread([&] {
      const cuda::Stream stream(device);
      const cuda::DeviceMemory memory(device, 4096);
      CHECK(memory.time_copies(false, 4096, 1) > 0);
    }).join();
    CHECK(fake_cuda::primary_contexts() == std::map<int, int64_t>{{1, 1}});
    // Control: the fake records a context on device 0. The CUDA runtime makes such a context when a new
    // thread calls cudaSetDevice.
    std::thread([] { fake_cuda::set_device(0); }).join();
    CHECK(fake_cuda::take_violation("a context on a device that nobody asked for"));
    CHECK(fake_cuda::primary_contexts().count(0) == 1);
    REQUIRE(loaded.driver.primary_context_release(0) == cuda::kSuccess);
  }
  CHECK(fake_cuda::primary_contexts().empty());
  for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
}
