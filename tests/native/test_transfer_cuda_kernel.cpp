// Tests a copy kernel that cannot be started, or that copies wrong bytes. flexkv detects such a kernel at
// start or at its first failure, and no page fails because of it. These tests use the fake driver and need no
// GPU.
#include <doctest/doctest.h>

#include <array>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "cuda/copy_ways.h"
#include "cuda/device_info.h"
#include "cuda/event.h"
#include "cuda_world.h"

using namespace flexkv;

namespace {

void moves(CudaWorld& world) {
  world.fill(0, 8);
  world.fill(1, 9);
  CHECK(world.run(world.op(OpKind::kD2H, {0, 1}, {3, 5})).status == Status::kOk);
  CHECK(world.slot_holds(5, 9));
  CHECK(world.run(world.op(OpKind::kH2D, {7, 8}, {5, 3})).status == Status::kOk);
  CHECK(world.holds(7, 9));
  CHECK(world.holds(8, 8));
}

}  // namespace

TEST_CASE("cuda kernel: one without an image for the device fails its self-test and is not used") {
  CudaWorld world({}, {}, kAll);
  CHECK(world.lane->copier().capabilities().kernel);  // control: the kernel can be launched
  fake_cuda::fail_launches(fake_cuda::kAlways);
  const cuda::CudaLane lane(world.device, fake_cuda::copy_kernels(), kAll);
  CHECK_FALSE(lane.copier().capabilities().kernel);
  CHECK(lane.copier().capabilities().batch);
  CHECK(lane.copier().notes() == "no copy kernel: self-test: the fake kernel has no image for this device");
  CHECK(lane.copier().failed_launches() == 0);
}

TEST_CASE("cuda kernel: one that changes a byte fails its self-test") {
  CudaWorld world({}, {.kernel_corrupts = true}, kAll);
  CHECK(world.lane->copier().notes() == "no copy kernel: self-test: other bytes came back");
  const int64_t tested = fake_cuda::calls().kernel;
  moves(world);
  CHECK(fake_cuda::calls().kernel == tested);
}

TEST_CASE(
    "cuda kernel: a launch that fails later is not tried again, and its pages arrive by the copy engine") {
  for (const int version : {13000, 12040}) {
    CAPTURE(version);
    CudaWorld world({}, {.version = version}, kAll);
    const cuda::Path engine = version == 13000 ? cuda::Path::kBatch : cuda::Path::kSingle;
    moves(world);
    CHECK(world.lane->copier().count(cuda::Path::kKernel).pieces == 2);
    CHECK(world.lane->copier().count(engine).pieces == 0);
    fake_cuda::fail_launches(1);
    moves(world);
    CHECK(world.lane->copier().count(cuda::Path::kKernel).pieces == 2);
    CHECK(world.lane->copier().count(engine).pieces == 2);
    CHECK(world.lane->copier().failed_launches() == 1);
    CHECK(world.lane->copier().notes().find("the copy kernel is not used any more, its runs go by the copy "
                                            "engine, slower: the fake kernel has "
                                            "no image") != std::string::npos);
  }
}

TEST_CASE("cuda kernel: short and long runs of one page each go their own way") {
  fake_cuda::reset();
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  {
    const auto device = cuda::Device::open(0, loaded.driver);
    const cuda::Current here(*device);
    cuda::Copier copier(device, fake_cuda::copy_kernels(), kAll);
    cuda::CopyStream stream(device, false);
    constexpr int64_t kLong = 72 << 10, kShort = 4 << 10;
    std::vector<std::byte> pool(2 * 2 * (kLong + kShort)), host(2 * (kLong + kShort));
    for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::byte>(i * 13 + (i >> 8));
    const auto base = reinterpret_cast<uintptr_t>(pool.data());
    // A pool with two blocks and two layers, each of which has rows of a cache and rows of an index.
    const Segment segments[] = {{base, kLong, kLong, 0, 0},
                                {base + 2 * kLong, kShort, kShort, kLong, 0},
                                {base + 2 * (kLong + kShort), kLong, kLong, kLong + kShort, 1},
                                {base + 2 * (2 * kLong + kShort), kShort, kShort, 2 * kLong + kShort, 1}};
    const cuda::PageEnds page{1, host.data()};
    const cuda::SplitRuns runs = cuda::split_runs(segments, 32 << 10);
    const std::span pages(&page, 1);
    CHECK(copier.launch(cuda::Direction::kToHost, runs.by_kernel, pages, stream));
    std::vector<cuda::Copy> copies;
    cuda::CopyLister(runs.by_engine, pages, INT64_MAX).next(INT64_MAX, SIZE_MAX, copies);
    CHECK(copier.copy(cuda::Direction::kToHost, copies, true, stream).empty());
    CHECK(stream.mark().empty());
    CHECK(cuda::Event(device, stream.handle()).wait().empty());
    CHECK(copier.count(cuda::Path::kKernel).bytes == 2 * kShort);
    CHECK(copier.count(cuda::Path::kBatch).bytes == 2 * kLong);
    for (const Segment& segment : segments) {
      const auto* run = reinterpret_cast<const std::byte*>(run_address(segment, 1));
      CHECK(std::equal(run, run + segment.run_bytes, host.data() + segment.page_offset));
    }
  }
  for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
}

TEST_CASE("cuda kernel: each stage has a point of its own, also of the next launch") {
  static std::vector<uint32_t> waited;
  fake_cuda::reset();
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  const auto device = cuda::Device::open(0, loaded.driver);
  const cuda::Current here(*device);
  cuda::CopyKernels kernels = fake_cuda::copy_kernels();
  kernels.wait = [](const uint32_t*, uint32_t value, void*) {
    waited.push_back(value);
    return std::string();
  };
  const auto copier = std::make_shared<cuda::Copier>(device, kernels, kAll);
  waited.clear();
  cuda::CopyStream stream(device, true);
  for (const int32_t stages : {3, 2}) {
    for (const auto& point : cuda::stage_points(copier, stream, stages)) CHECK(point->make_wait(0).empty());
  }
  CHECK(waited == std::vector<uint32_t>{1, 2, 3, 4, 5});
}

TEST_CASE("cuda kernel: measured lengths decide which runs it copies, for loads and stores apart") {
  constexpr int64_t kRun = 4096;
  using Below = std::array<std::optional<int64_t>, 2>;
  for (const auto& [below, loaded, stored] :
       {std::tuple{Below{}, 1, 1}, std::tuple{Below{kRun, kRun + 1}, 0, 1},
        std::tuple{Below{kRun + 1, kRun}, 1, 0}, std::tuple{Below{0, 0}, 0, 0}}) {
    CAPTURE(below[0].value_or(-1));
    CudaWorld world({.run_bytes = kRun}, {}, {.measured_below = below});
    const cuda::Copier& copier = world.lane->copier();
    world.fill(1, 7);
    CHECK(world.run(world.op(OpKind::kD2H, {1}, {0})).status == Status::kOk);
    CHECK(copier.count(cuda::Path::kKernel).pieces == stored);
    CHECK(world.run(world.op(OpKind::kH2D, {2}, {0})).status == Status::kOk);
    CHECK(copier.count(cuda::Path::kKernel).pieces == stored + loaded);
    CHECK(world.holds(2, 7));
    CHECK(cuda::describe_ways(copier.capabilities(), cuda::Direction::kToDevice)
              .find(below[0] == kRun ? "below 4 KiB" : "in batches") != std::string::npos);
  }
}

TEST_CASE("cuda kernel: a device is named by its UUID, without a context") {
  fake_cuda::reset({.devices = 2});
  const cuda::LoadedDriver loaded = cuda::find_functions(fake_cuda::finder());
  CHECK(cuda::identify(0, loaded.driver).uuid == "GPU-f0efeeed-eceb-eae9-e8e7-e6e5e4e3e2e1");
  CHECK(cuda::identify(1, loaded.driver).uuid == "GPU-f1f0efee-edec-ebea-e9e8-e7e6e5e4e3e2");
  CHECK(cuda::identify(0, loaded.driver).pci == "FFFF:00:00.0");
  CHECK_THROWS_AS(cuda::identify(2, loaded.driver), ConfigError);
  CHECK(fake_cuda::primary_contexts().empty());
}

TEST_CASE("cuda kernel: copies end where the registration of their memory does") {
  for (const cuda::CopySwitches& switches :
       {cuda::CopySwitches{true, false}, cuda::CopySwitches{false, false}}) {
    CudaShape shape;
    shape.block_first = true;  // blocks are contiguous, and so are slots
    shape.exact_slots = true;
    shape.run_bytes = 4096;
    CudaWorld world(shape, {}, switches);
    world.fill(2, 2);
    world.fill(5, 5);
    CHECK(world.run(world.op(OpKind::kD2H, {2, 3, 4, 5}, {2, 3, 4, 5})).status == Status::kOk);
    CHECK(world.slot_holds(2, 2));
    CHECK(world.slot_holds(5, 5));
    // Control: the driver refuses a copy across the end of an extent, because each extent is registered
    // separately.
    const cuda::Current here(*world.device);
    const cuda::Stream stream(world.device);
    CHECK(world.device->driver().copy_to_host(world.pool->slot(3),
                                              reinterpret_cast<uintptr_t>(world.memory.data()), 2 * 3 * 4096,
                                              stream.handle()) != cuda::kSuccess);
  }
}
