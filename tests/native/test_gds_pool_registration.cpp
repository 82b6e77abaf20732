// Tests the registration of the engine's pool with cuFile. Contiguous blocks then move directly between disk
// and pool, and no registration outlives the pool's memory. A fake cuFile counts moves and registrations, and
// uses host memory as GPU memory.
#include <fstream>
#include <numeric>

#include "base/error.h"
#include "cuda/device_info.h"
#include "fake_cufile.h"
#include "gds/pool_registration.h"
#include "gds/raw/raw_layout.h"
#include "testing/transform_device_around.h"

using namespace flexkv;

namespace {

// A device whose memory disks can access only in a window of `window` bytes.
class NarrowDevice : public TransformDeviceAround {
 public:
  explicit NarrowDevice(int64_t window) : TransformDeviceAround(host_transform_device()), window_(window) {}
  int64_t window_bytes() const override { return window_; }
  void* allocate(int64_t bytes) override {
    if (is_full) throw CapacityError("no memory");
    return TransformDeviceAround::allocate(bytes);
  }

  bool is_full = false;

 private:
  const int64_t window_;
};

struct RegionOptions {
  RegisterPool mode = RegisterPool::kAuto;
  int64_t piece_bytes = 64 << 10;
  int64_t window = 0;
  int64_t shift = 0;        // distance of the pool's address from a 4 KiB boundary, in bytes
  bool empty_file = false;  // the file is empty, so the first read finds nothing
};

// A block-first pool of 12 blocks, and one file that the fake cuFile reads and writes.
struct PoolWorld {
  static constexpr int64_t kRuns = 4, kRun = 4096, kBlocks = 12, kStripe = kRuns * kRun;
  static constexpr int64_t kImage = kStripe + 4096;

  explicit PoolWorld(RegionOptions options = {})
      : memory(static_cast<size_t>(kBlocks * kStripe) + 2 * 65536) {
    const auto start = reinterpret_cast<uintptr_t>(memory.data());
    pool = memory.data() + (65536 - start % 65536) % 65536 + options.shift;
    std::vector<Segment> runs;
    for (int64_t run = 0; run < kRuns; ++run) {
      runs.push_back({reinterpret_cast<uintptr_t>(pool) + static_cast<uintptr_t>(run * kRun), kStripe, kRun,
                      run * kRun, static_cast<int32_t>(run)});
    }
    const KvView view(runs, kBlocks, kStripe);
    map = std::make_unique<PageMap>(PageMap::stripe(view, {0, kStripe, kStripe, kImage}, true));
    region = {reinterpret_cast<uintptr_t>(pool), kBlocks, kStripe, kStripe};
    std::ofstream(folder.file("slab")) << std::string(options.empty_file ? 0 : 8192, 'x');
    files = std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("slab")}});
    REQUIRE(files->at(0, 0).direct_fd >= 0);
    device = std::make_shared<NarrowDevice>(options.window);
    io = std::make_shared<CufileIo>(
        std::make_shared<Cufile>(fake_table()), files,
        std::make_shared<BouncedFileIo>(std::make_shared<PosixFileIo>(files), device));
    GdsOptions of_manager;
    of_manager.max_staging_blocks = 3;
    of_manager.register_pool = options.mode;
    of_manager.pool_piece_bytes = options.piece_bytes;
    manager = std::make_unique<GDSManager>(files, of_manager, device, io);
  }
  ~PoolWorld() {
    manager = nullptr;
    io = nullptr;
    CHECK(fake.buffers.empty());
    CHECK(fake.registered == fake.deregistered);
  }
  void start() {
    manager->register_pool(region);
    manager->reserve_staging(*map, pages());
  }
  static std::vector<StagedPage> pages() {
    std::vector<StagedPage> all;
    for (int64_t i = 0; i < kBlocks; ++i) all.push_back({i, 0, 0, i * kImage});
    return all;
  }
  TransferReport move(bool is_read) { return manager->transfer(*map, pages(), is_read); }
  // Writes and reads every block, and checks that the read returns the written bytes. Returns the report of
  // the read.
  TransferReport there_and_back() {
    std::mt19937 random(9);
    for (int64_t i = 0; i < kBlocks * kStripe; ++i) pool[i] = static_cast<unsigned char>(random());
    const std::vector<unsigned char> content(pool, pool + kBlocks * kStripe);
    REQUIRE(move(false).ok());
    std::memset(pool, 0, content.size());
    TransferReport read = move(true);
    REQUIRE(read.ok());
    CHECK(std::memcmp(pool, content.data(), content.size()) == 0);
    return read;
  }
  // The number of registered buffers in the pool.
  int64_t in_pool() const {
    return std::count_if(fake.buffers.begin(), fake.buffers.end(), [&](const auto& buffer) {
      return buffer.first >= pool && buffer.first < pool + kBlocks * kStripe;
    });
  }
  std::string refusal() const { return manager->pool().refusal; }

  TemporaryFolder folder;
  std::vector<unsigned char> memory;
  unsigned char* pool = nullptr;
  PoolRegion region;
  std::unique_ptr<PageMap> map;
  std::shared_ptr<NarrowDevice> device;
  std::shared_ptr<RawFiles> files;
  std::shared_ptr<CufileIo> io;
  std::unique_ptr<GDSManager> manager;
};

}  // namespace

TEST_CASE("pool registration: pieces have whole blocks, all of them, and none of a block that is another's") {
  for (const int64_t stride : {4096, 12288, 20480, 65536, 196608}) {
    for (const int64_t most : {1, 65536, 1000000}) {
      for (const int64_t blocks : {1, 7, 100}) {
        CAPTURE(stride);
        CAPTURE(most);
        const PoolRegion region{1 << 20, blocks, stride, stride - 4096 > 0 ? stride - 4096 : stride};
        uintptr_t next = region.base;
        for (const MemoryPiece& piece : pool_pieces(region, most)) {
          CHECK(piece.base == next);
          CHECK((piece.bytes <= most || piece.bytes == region.block_bytes));
          // A piece begins on a GPU page (64 KiB) if that is possible.
          if (most >= std::lcm(stride, int64_t{65536})) CHECK(piece.base % 65536 == 0);
          const int64_t held = (piece.bytes + stride - region.block_bytes) / stride;
          next += static_cast<uintptr_t>(held * stride);
        }
        CHECK(next == region.base + static_cast<uintptr_t>(blocks * stride));
      }
    }
  }
  CHECK(pool_pieces({4096, 0, 4096, 4096}).empty());
}

TEST_CASE("pool registration: blocks of one piece go straight, and only their digests through a slot") {
  reset_fake();
  PoolWorld world;
  world.start();
  CHECK(world.in_pool() == 3);  // 12 blocks of 16 KiB in pieces of 64 KiB
  CHECK(world.manager->staging_bytes() == 3 * 4096);
  const TransferReport read = world.there_and_back();
  CHECK(!read.staged);
  CHECK(read.bounced_calls + read.unknown_calls == 0);
  CHECK(read.io_calls == 2 * PoolWorld::kBlocks);
  CHECK(world.manager->totals().straight_pages == 2 * PoolWorld::kBlocks);
  CHECK(world.manager->describe().find("the pool is registered: 3 pieces, 196608 bytes") !=
        std::string::npos);
  CHECK(world.refusal().empty());
}

TEST_CASE("pool registration: ranges of layers go straight, each with the trailer through a slot") {
  reset_fake();
  PoolWorld world;
  world.start();
  world.there_and_back();
  const std::vector<unsigned char> content(world.pool, world.pool + PoolWorld::kBlocks * PoolWorld::kStripe);
  std::memset(world.pool, 0, content.size());
  const KvView view(world.map->runs(), PoolWorld::kBlocks, PoolWorld::kStripe);
  const StripePlace place{0, PoolWorld::kStripe, PoolWorld::kStripe, PoolWorld::kImage};
  const auto read = [&](LayerRange layers) {
    return world.manager->transfer(PageMap::stripe(view, place, true, layers), PoolWorld::pages(), true);
  };
  for (const LayerRange layers : {LayerRange{0, 1}, LayerRange{1, 4}}) {
    const TransferReport report = read(layers);
    CHECK(report.ok());
    CHECK(!report.staged);
    CHECK(report.bounced_calls + report.unknown_calls == 0);
    CHECK(report.io_calls == 2 * PoolWorld::kBlocks);
    for (int64_t block = 0; block < PoolWorld::kBlocks; ++block) {
      const int64_t at = block * PoolWorld::kStripe, came = layers.hi * PoolWorld::kRun;
      CHECK(std::memcmp(world.pool + at, content.data() + at, static_cast<size_t>(came)) == 0);
      if (layers.hi < 4) CHECK(world.pool[at + came] == 0);
    }
  }
  std::fstream file(world.folder.file("slab"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(7 * PoolWorld::kImage + 2 * PoolWorld::kRun);
  file.put(static_cast<char>(content[7 * PoolWorld::kStripe + 2 * PoolWorld::kRun] ^ 1));
  file.close();
  CHECK(read({0, 1}).ok());
  const TransferReport bad = read({1, 4});
  REQUIRE(bad.failures.size() == 1);
  CHECK(bad.failures.front().position == 7);
  CHECK(bad.failures.front().cause == StagedFailure::kDigest);
}

TEST_CASE("pool registration: the control, without registration every page passes through staging") {
  {
    reset_fake();
    PoolWorld off({.mode = RegisterPool::kOff});
    off.start();
    CHECK(off.in_pool() == 0);
    CHECK(off.there_and_back().staged);
    CHECK(off.manager->totals().straight_pages == 0);
    CHECK(off.refusal() == "gds.register_pool is off");
  }
  reset_fake();
  PoolWorld left_out;  // register_pool() is not called
  left_out.manager->reserve_staging(*left_out.map, PoolWorld::pages());
  CHECK(left_out.there_and_back().staged);
}

TEST_CASE("pool registration: raw blocks go without staging and without a launch") {
  for (const RegisterPool mode : {RegisterPool::kAuto, RegisterPool::kOff}) {
    reset_fake();
    PoolWorld world({.mode = mode});
    auto* tensor = reinterpret_cast<int64_t*>(world.pool);
    const GTensorHandler pool(BackendType::TRTLLM, &tensor, PoolWorld::kRuns, 0, PoolWorld::kStripe,
                              PoolWorld::kRun);
    const RawBlockLayout layout{.layer_stride = PoolWorld::kRun,
                                .block_stride = PoolWorld::kStripe,
                                .chunk_bytes = PoolWorld::kRun,
                                .kv_dim = 1,
                                .total_layers = PoolWorld::kRuns};
    world.map = std::make_unique<PageMap>(raw_map(pool, layout, std::vector<int32_t>{0, 1, 2, 3}));
    world.start();
    const TransferReport read = world.there_and_back();
    const bool straight = mode == RegisterPool::kAuto;
    CHECK(read.staged == !straight);
    CHECK((read.launches == 0) == straight);
    CHECK((world.manager->staging_bytes() == 0) == straight);
    CHECK(read.io_calls == PoolWorld::kBlocks);
  }
}

TEST_CASE("pool registration: released before the memory goes, registered again with the next transfer") {
  reset_fake();
  PoolWorld world;
  world.start();
  const int64_t before = fake.registered;
  CHECK(world.in_pool() == 3);
  world.manager->release_pool();
  CHECK(world.in_pool() == 0);
  CHECK(world.manager->pool().released == 3);
  world.manager->release_pool();  // idempotent
  CHECK(world.manager->pool().released == 3);
  world.manager->restore_pool();  // the manager calls this when the engine wakes up
  CHECK(world.in_pool() == 3);
  CHECK(fake.registered == before + 3);
  CHECK(!world.there_and_back().staged);
  world.manager->release_pool();
  CHECK(!world.there_and_back().staged);  // the transfer registers the pool again
  CHECK(world.in_pool() == 3);
  CHECK(world.manager->pool().registered == 9);
  world.manager->close();
  CHECK(fake.buffers.empty());
  world.manager->release_pool();
  world.manager->restore_pool();
  CHECK(fake.buffers.empty());
}

TEST_CASE("pool registration: a transfer in flight keeps the registration") {
  reset_fake();
  PoolWorld world;
  world.start();
  std::atomic<bool> refused = false;  // set by the threads that read the disk
  fake.before_move = [&] {
    try {
      world.manager->release_pool();
    } catch (const ContractError&) {
      refused = true;
    }
  };
  std::thread mover([&] { CHECK(world.move(true).failures.size() == PoolWorld::kBlocks); });  // no images
  mover.join();
  fake.before_move = nullptr;
  CHECK(refused);
  CHECK(world.in_pool() == 3);
}

TEST_CASE("pool registration: what cannot be registered passes through staging, with the reason") {
  struct Case {
    std::string words;
    RegionOptions options;
    std::function<void()> prepare;
  };
  const int64_t bytes = PoolWorld::kBlocks * PoolWorld::kStripe;
  const std::vector<Case> cases{
      {"compatibility mode",
       {},
       [] {
         fake.status_flags = 0;
         fake.all_posix = true;
       }},
      {"max_device_pinned_mem_size_kb", {}, [&] { fake.pinned_kib = bytes / 1024 - 4; }},
      {"BAR1", {.window = bytes - 4096}, [] {}},
      {"4 KiB boundaries", {.shift = 512}, [] {}},
      {"after 2 of 3 pieces: cuFileBufRegister: cuFile error 5036", {}, [] { fake.most_buffers = 2; }},
      {"no call has been seen to go straight", {}, [] { fake.version = 1140; }},
      {"compatibility mode", {}, [] { fake.all_posix = true; }},
  };
  for (const RegisterPool mode : {RegisterPool::kAuto, RegisterPool::kOn}) {
    for (const Case& of : cases) {
      CAPTURE(of.words);
      reset_fake();
      of.prepare();
      RegionOptions options = of.options;
      options.mode = mode;
      PoolWorld world(options);
      world.start();
      // `on` registers the pool even if cuFile does not show the route of its calls.
      const bool registers = mode == RegisterPool::kOn && world.in_pool() > 0;
      CHECK(registers == (mode == RegisterPool::kOn &&
                          (fake.version == 1140 || (fake.all_posix && fake.status_flags != 0))));
      if (!registers) {
        CHECK(world.in_pool() == 0);
        CHECK(world.refusal().find(of.words) != std::string::npos);
        CHECK(world.manager->describe().find(of.words) != std::string::npos);
      }
      const bool straight = registers && fake.version == 1140;
      CHECK(world.there_and_back().staged == !straight);
      CHECK(world.io->name().find("staging is bounced") == std::string::npos);
    }
  }
}

TEST_CASE("pool registration: without memory for a look the pool waits for the first transfers") {
  reset_fake();
  PoolWorld world;
  world.device->is_full = true;
  world.manager->register_pool(world.region);
  CHECK(world.refusal().find("no call has been seen") != std::string::npos);
  CHECK_THROWS_AS(world.manager->reserve_staging(*world.map, PoolWorld::pages()), CapacityError);
  world.device->is_full = false;
  CHECK(world.move(false).staged);
  CHECK(!world.there_and_back().staged);
}

TEST_CASE("pool registration: the limits are those of the whole pool, to the byte") {
  const int64_t bytes = PoolWorld::kBlocks * PoolWorld::kStripe;
  reset_fake();
  PoolWorld fits({.window = bytes});
  fits.start();
  CHECK(fits.in_pool() == 3);
}

TEST_CASE("pool registration: files without content are seen later, and then the pool is registered") {
  reset_fake();
  PoolWorld world({.empty_file = true});
  world.start();
  CHECK(world.refusal().find("no call has been seen") != std::string::npos);
  CHECK(world.move(false).staged);
  CHECK(world.in_pool() == 0);
  CHECK(!world.there_and_back().staged);
  CHECK(world.in_pool() == 3);
}

TEST_CASE("pool registration: a file whose calls bounce later takes its pages through staging again") {
  reset_fake();
  PoolWorld world;
  world.start();
  CHECK(!world.there_and_back().staged);
  fake.all_posix = true;
  static_cast<void>(world.move(true));
  CHECK(world.there_and_back().staged);
  fake.all_posix = false;
}

TEST_CASE(
    "pool registration: groups that share memory block by block are registered once, others not at all") {
  reset_fake();
  PoolWorld world;
  world.start();
  world.manager->register_pool(world.region);
  CHECK(world.in_pool() == 3);
  CHECK(world.refusal().empty());
  PoolRegion other = world.region;
  other.base += 8192;
  other.blocks -= 1;
  world.manager->register_pool(other);
  CHECK(world.in_pool() == 3);
  CHECK(world.refusal().find("share its memory") != std::string::npos);
  CHECK_THROWS_AS(world.manager->register_pool({4096, 0, 4096, 4096}), GeometryError);
  CHECK_THROWS_AS(world.manager->register_pool({4096, 2, 4096, 8192}), GeometryError);
  CHECK_THROWS_AS(world.manager->register_pool({UINTPTR_MAX - 4095, 2, 4096, 4096}), GeometryError);
}

TEST_CASE("pool registration: plain memory needs none, and is refused nothing") {
  const TemporaryFolder folder;
  const auto files = std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("a")}});
  GDSManager manager(files, {}, host_transform_device(), std::make_shared<PosixFileIo>(files));
  manager.register_pool({4096, 2, 4096, 4096});
  manager.refuse_pool("a block lies in 2 pieces of it");
  CHECK(manager.pool().refusal.empty());
  CHECK(manager.pool().registered == 0);
}

TEST_CASE("pool registration: cuFile's limit is raised before its driver opens, for a larger GPU alone") {
  for (const int64_t gib : {0, 24, 32, 80}) {
    CAPTURE(gib);
    reset_fake();
    const Cufile cufile(fake_table(), (gib << 30) + 5000);
    CHECK(!fake.set_while_open);
    CHECK(fake.set_pinned_kib == (gib >= 32 ? static_cast<size_t>((gib << 20) + 4) : 0));
    CHECK(cufile.pinned_limit() == (gib >= 32 ? (gib << 30) + 4096 : int64_t{32} << 30));
  }
  reset_fake();
  CufileTable old = fake_table();
  old.set_max_pinned_kib = nullptr;
  CHECK(Cufile(old, int64_t{80} << 30).pinned_limit() == int64_t{32} << 30);
}

TEST_CASE("pool registration: BAR1 is the largest window that the kernel names") {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.file("0000:1a:00.0"));
  std::ofstream(folder.file("0000:1a:00.0") + "/resource")
      << "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n"
         "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
         "0x0000206000000000 0x0000207fffffffff 0x000000000014220c\n";
  CHECK(cuda::bar_bytes("0000:1A:00.0", folder.file("")) == int64_t{128} << 30);
  CHECK(cuda::bar_bytes("0000:2a:00.0", folder.file("")) == 0);
}
