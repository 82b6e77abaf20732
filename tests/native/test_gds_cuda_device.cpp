// Staged transfers whose pool and slots are in the memory of a fake GPU. They use flexkv's own code for
// streams, fences, contexts and captures. The CPU does the kernel's work lane by lane, so these tests need no
// GPU.
#include <doctest/doctest.h>

#include <atomic>
#include <future>
#include <thread>

#include "base/error.h"
#include "cuda/event.h"
#include "fake_cuda.h"
#include "gds/bounced_file_io.h"
#include "gds/transform/cuda_device.h"
#include "gds_world.h"
#include "testing/transform_lanes.h"

using namespace flexkv;

namespace {

std::atomic<int> launches_to_fail{0};
std::atomic<bool> launches_corrupt{false};

std::string launch(const TransformBatch& batch, TransformGrid, int multiprocessors, void* stream) {
  if (multiprocessors < 1) return "no multiprocessors";
  if (launches_to_fail > 0) {
    --launches_to_fail;
    return "no kernel image is available for execution on the device";
  }
  fake_cuda::enqueue(reinterpret_cast<uintptr_t>(stream), [batch] {
    transform_lane_by_lane(batch);
    if (launches_corrupt && to_pool(batch.mode)) {
      const TransformPage& page = batch.pages[0];
      *reinterpret_cast<unsigned char*>(batch.runs[0].base +
                                        static_cast<uintptr_t>(page.block * batch.runs[0].block_stride)) ^= 1;
    }
  });
  return {};
}

// Records which device was current when memory was registered and deregistered, and checks the current device
// at each transfer. If `refusal` is not empty, registration fails with this reason.
class ContextIo : public FileIo {
 public:
  explicit ContextIo(std::shared_ptr<FileIo> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  IoOutcome transfer(const IoCall& call) override {
    CHECK(fake_cuda::capture_mode() == cuda::kCaptureRelaxed);
    CHECK(fake_cuda::current_device() == device);
    return inner_->transfer(call);
  }
  IoRoute route(const IoCall& call) const override { return inner_->route(call); }
  std::string add_memory(void*, int64_t) override {
    registered_on = fake_cuda::current_device();
    return refusal;
  }
  void remove_memory(void*) override { removed_on = fake_cuda::current_device(); }

  int device = 1;
  std::string refusal;
  int registered_on = -2, removed_on = -2;

 private:
  const std::shared_ptr<FileIo> inner_;
};

struct GpuWorld {
  static constexpr int32_t kLayers = 3, kBlocks = 8;
  static constexpr int64_t kRun = 3000, kStripe = kLayers * kRun, kDigests = 12288, kImage = 16384;

  explicit GpuWorld(int ordinal = 1) : pool(static_cast<size_t>(kLayers * kBlocks * kRun)) {
    launches_to_fail = 0;
    launches_corrupt = false;
    fake_cuda::reset({.devices = 2});
    loaded = cuda::find_functions(fake_cuda::finder());
    gpu = cuda::Device::open(ordinal, loaded.driver);
    engine_stream = fake_cuda::make_stream(false, ordinal);
    device = cuda_transform_device(gpu, engine_stream, TransformGrid::kBesideModel, &launch);
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(pool.data() + layer * kBlocks * kRun), kRun, kRun,
                      layer * kRun, layer});
    }
    view = std::make_unique<KvView>(runs, kBlocks, kStripe);
    map = std::make_unique<PageMap>(PageMap::stripe(*view, {0, kDigests, kDigests, kImage}, true));
    const auto files = std::make_shared<RawFiles>(FilePaths{{folder.file("0")}});
    io = std::make_shared<ContextIo>(
        std::make_shared<BouncedFileIo>(std::make_shared<PosixFileIo>(files), device));
    io->device = ordinal;
    GdsOptions options;
    options.max_staging_blocks = 4;
    options.threads_per_device = 2;
    manager = std::make_unique<GDSManager>(files, options, device, io);
  }
  ~GpuWorld() {
    manager.reset();
    device.reset();
    io.reset();
    gpu.reset();
    fake_cuda::destroy_stream(engine_stream);
    CHECK(fake_cuda::primary_contexts().empty());
    for (const std::string& rule : fake_cuda::violations()) FAIL_CHECK("broken rule: " << rule);
  }
  TransferReport move(bool is_read) {
    std::vector<StagedPage> pages;
    for (int64_t i = 0; i < kBlocks; ++i) pages.push_back({i, 0, 0, i * kImage});
    return manager->transfer(*map, pages, is_read);
  }
  void fill() {
    for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<unsigned char>(i * 7 + (i >> 9));
  }

  TemporaryFolder folder;
  std::vector<unsigned char> pool;
  cuda::LoadedDriver loaded;
  std::shared_ptr<cuda::Device> gpu;
  uintptr_t engine_stream = 0;
  std::shared_ptr<TransformDevice> device;
  std::unique_ptr<KvView> view;
  std::unique_ptr<PageMap> map;
  std::shared_ptr<ContextIo> io;
  std::unique_ptr<GDSManager> manager;
};

}  // namespace

TEST_CASE("gds on a fake GPU: every byte arrives, on its device alone, beside a capture of the engine") {
  GpuWorld world(1);
  world.fill();
  const std::vector<unsigned char> content = world.pool;
  const uintptr_t captured = fake_cuda::make_stream(false, 1);
  fake_cuda::begin_capture(captured);
  CHECK(world.move(false).ok());
  std::fill(world.pool.begin(), world.pool.end(), 0);
  CHECK(world.move(true).ok());
  CHECK(world.pool == content);
  CHECK(fake_cuda::end_capture(captured));
  fake_cuda::destroy_stream(captured);
  // flexkv made no context on device 0, and this thread still has no current device.
  CHECK(fake_cuda::primary_contexts() == std::map<int, int64_t>{{1, 1}});
  CHECK(fake_cuda::current_device() == -1);
  CHECK(fake_cuda::capture_mode() == cuda::kCaptureGlobal);
}

TEST_CASE("gds on a fake GPU: staging is registered and let go with its device current, whoever calls") {
  GpuWorld world(1);
  std::thread([&] {
    fake_cuda::set_device(0);  // this thread of the engine uses another device
    CHECK(fake_cuda::take_violation("nobody asked for"));
    CHECK(world.move(false).ok());
    CHECK(world.io->registered_on == 1);
    world.manager->close();
    CHECK(world.io->removed_on == 1);
    CHECK(fake_cuda::current_device() == 0);
  }).join();
  REQUIRE(world.loaded.driver.primary_context_release(0) == cuda::kSuccess);
}

TEST_CASE("gds on a fake GPU: staging that the I/O does not register is told") {
  {
    GpuWorld world;
    CHECK(world.move(false).ok());
    CHECK(world.manager->describe().find("not registered") == std::string::npos);
  }
  GpuWorld refused;
  refused.io->refusal = "cuFileBufRegister: out of BAR space";
  CHECK(refused.move(false).ok());  // the transfer succeeds although registration failed
  CHECK(refused.manager->describe().find(
            "; staging is not registered: cuFileBufRegister: out of BAR space") != std::string::npos);
}

TEST_CASE("gds on a fake GPU: a copy without an event behind it has ended all the same when it is told") {
  GpuWorld world;
  std::vector<unsigned char> source(4096, 7), target(4096, 0);
  CHECK(world.device->copy(target.data(), source.data(), 4096).empty());  // makes the stream
  std::fill(target.begin(), target.end(), 0);
  fake_cuda::refuse("cuEventRecord", 1);
  fake_cuda::hold_all(true);
  std::atomic<bool> let_go{false};
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    let_go = true;
    fake_cuda::hold_all(false);
  });
  CHECK(world.device->copy(target.data(), source.data(), 4096).find("cuEventRecord") != std::string::npos);
  CHECK(let_go);
  CHECK(target == source);
  opener.join();
}

TEST_CASE("gds on a fake GPU: memory can be had while other memory is let go") {
  GpuWorld world;
  void* memory = world.device->allocate(4096);
  std::promise<void*> had;
  std::future<void*> other = had.get_future();
  std::thread asks;
  bool in_time = false;
  fake_cuda::on_free([&] {
    fake_cuda::on_free(nullptr);
    asks = std::thread([&] { had.set_value(world.device->allocate(4096)); });
    in_time = other.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  });
  world.device->release(memory);
  asks.join();
  CHECK(in_time);
  world.device->release(other.get());
}

TEST_CASE("gds on a GPU by its number: a build or a machine without one says so") {
  const auto open = [](int32_t number) { cuda_transform_device(number, 0, TransformGrid::kBesideModel); };
  CHECK_THROWS_AS(open(1 << 20), ConfigError);
  if (layout_launcher() == nullptr) {
    CHECK_THROWS_WITH_AS(open(0), "GPU 0: this is a build without CUDA; allowed is -1 (plain memory)",
                         ConfigError);
  }
}

TEST_CASE("gds on a fake GPU: transforms that cannot be started, or change a byte, are refused at start") {
  GpuWorld world;
  const auto again = [&](LayoutLauncher launcher) {
    return cuda_transform_device(world.gpu, world.engine_stream, TransformGrid::kBesideModel, launcher);
  };
  CHECK_THROWS_WITH_AS(again(nullptr), "GPU 1: this is a build without CUDA; allowed is -1 (plain memory)",
                       ConfigError);
  launches_to_fail = 1;
  CHECK_THROWS_WITH_AS(
      again(&launch),
      "GPU 1: self-test of the layout transform: no kernel image is available for execution on the "
      "device",
      ConfigError);
  launches_corrupt = true;
  CHECK_THROWS_WITH_AS(again(&launch), "GPU 1: self-test of the layout transform: other bytes came back",
                       ConfigError);
  launches_corrupt = false;
  CHECK(again(&launch)->name() == "GPU 1");
}

TEST_CASE("gds on a fake GPU: a launch that fails names its blocks, and the next transfer works") {
  GpuWorld world;
  world.fill();
  launches_to_fail = 1;
  const TransferReport report = world.move(false);
  CHECK_FALSE(report.ok());
  CHECK(report.failures.size() < GpuWorld::kBlocks);
  CHECK(report.failures.front().reason.find("no kernel image") != std::string::npos);
  CHECK(world.move(false).ok());
}

TEST_CASE("gds on a fake GPU: a transform waits for what the engine has enqueued") {
  GpuWorld world;
  world.fill();
  std::atomic<bool> written{false};
  std::atomic<bool> open{false};
  fake_cuda::enqueue(world.engine_stream, [&] {
    while (!open) std::this_thread::yield();
    world.pool[0] = 200;
    written = true;
  });
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    open = true;
  });
  CHECK(world.move(false).ok());
  CHECK(written);
  opener.join();
  std::fill(world.pool.begin(), world.pool.end(), 0);
  CHECK(world.move(true).ok());
  CHECK(world.pool[0] == 200);
}

TEST_CASE("gds on a fake GPU: an engine's stream that is captured is refused, and the capture stays whole") {
  GpuWorld world;
  fake_cuda::begin_capture(world.engine_stream);
  const TransferReport report = world.move(false);
  CHECK(report.failures.size() == GpuWorld::kBlocks);
  CHECK(report.failures.front().reason.find("is being captured into a graph") != std::string::npos);
  CHECK(world.device->await_engine(nullptr).find("is being captured into a graph") != std::string::npos);
  CHECK(fake_cuda::end_capture(world.engine_stream));
  CHECK(world.move(false).ok());
}

TEST_CASE("gds on a fake GPU: ranges of layers arrive one by one, each checked by its own digests") {
  GpuWorld world;
  world.fill();
  const std::vector<unsigned char> content = world.pool;
  REQUIRE(world.move(false).ok());
  // The reads of single ranges of layers below use these pages.
  std::vector<StagedPage> pages;
  for (int64_t i = 0; i < GpuWorld::kBlocks; ++i) pages.push_back({i, 0, 0, i * GpuWorld::kImage});
  const auto read = [&](LayerRange layers) {
    const StripePlace place{0, GpuWorld::kDigests, GpuWorld::kDigests, GpuWorld::kImage};
    return world.manager->transfer(PageMap::stripe(*world.view, place, true, layers), pages, true);
  };
  const auto layer = [](const std::vector<unsigned char>& pool, int32_t number) {
    const auto begin = pool.begin() + number * GpuWorld::kBlocks * GpuWorld::kRun;
    return std::vector<unsigned char>(begin, begin + GpuWorld::kBlocks * GpuWorld::kRun);
  };
  std::fill(world.pool.begin(), world.pool.end(), 0);
  CHECK(read({0, 1}).ok());
  CHECK(layer(world.pool, 0) == layer(content, 0));
  CHECK(layer(world.pool, 1) == std::vector<unsigned char>(layer(content, 1).size(), 0));
  CHECK(read({1, 3}).ok());
  CHECK(world.pool == content);
  // Changes a byte of layer 2 of page 5 on disk.
  std::fstream file(world.folder.file("0"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(5 * GpuWorld::kImage + 2 * GpuWorld::kRun + 17);
  file.put(static_cast<char>(content[(2 * GpuWorld::kBlocks + 5) * GpuWorld::kRun + 17] ^ 1));
  file.close();
  CHECK(read({0, 1}).ok());
  const TransferReport bad = read({1, 3});
  REQUIRE(bad.failures.size() == 1);
  CHECK(bad.failures.front().position == 5);
  CHECK(bad.failures.front().reason == "digest mismatch in run 2 (layer 2)");
}
