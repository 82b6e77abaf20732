// Tests transfers of blocks that are contiguous in the pool. A block's bytes move directly between disk and
// pool, without a staging slot. Its digests pass through a slot, and the transform computes them from the
// bytes in the pool.
#include <doctest/doctest.h>

#include "gds_world.h"
#include "testing/transform_lanes.h"

using namespace flexkv;

namespace {

struct BlockFirstWorld {
  static constexpr int64_t kRuns = 5, kRun = 3276, kBlocks = 6, kStripe = 16384, kImage = kStripe + 4096;

  explicit BlockFirstWorld(bool lanes, std::vector<FileFaultRule> rules = {})
      : memory(static_cast<size_t>(kBlocks * kStripe) + 4096) {
    pool = memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096) % 4096;
    std::vector<Segment> runs;
    for (int64_t run = 0; run < kRuns; ++run) {
      const int64_t bytes = run + 1 < kRuns ? kRun : kStripe - run * kRun;
      runs.push_back({reinterpret_cast<uintptr_t>(pool) + static_cast<uintptr_t>(run * kRun), kStripe, bytes,
                      run * kRun, static_cast<int32_t>(run)});
    }
    const KvView view(runs, kBlocks, kStripe);
    map = std::make_unique<PageMap>(PageMap::stripe(view, {0, kStripe, kStripe, kImage}, true));
    const auto files =
        std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("images")}});
    io = std::make_shared<FaultyFileIo>(std::make_shared<PosixFileIo>(files), std::move(rules));
    direct = files->at(0, 0).direct_fd >= 0;
    manager = std::make_unique<GDSManager>(files, GdsOptions{},
                                           lanes ? lane_transform_device() : host_transform_device(), io);
  }
  TransferReport move(bool is_read) {
    std::vector<StagedPage> pages;
    for (int64_t i = 0; i < kBlocks; ++i) pages.push_back({i, 0, 0, i * kImage});
    return manager->transfer(*map, pages, is_read);
  }
  std::vector<unsigned char> content() const { return {pool, pool + kBlocks * kStripe}; }

  TemporaryFolder folder;
  std::vector<unsigned char> memory;
  unsigned char* pool = nullptr;
  bool direct = false;
  std::unique_ptr<PageMap> map;
  std::shared_ptr<FaultyFileIo> io;
  std::unique_ptr<GDSManager> manager;
};

}  // namespace

TEST_CASE("a page of one piece moves without a copy, digested and verified in the pool") {
  for (const bool lanes : {false, true}) {
    CAPTURE(lanes);
    BlockFirstWorld world(lanes);
    std::mt19937 random(9);
    for (auto& byte : world.memory) byte = static_cast<unsigned char>(random());
    const auto content = world.content();
    const TransferReport written = world.move(false);
    CHECK(written.ok());
    CHECK(world.content() == content);
    std::memset(world.pool, 0, static_cast<size_t>(BlockFirstWorld::kBlocks * BlockFirstWorld::kStripe));
    const TransferReport read = world.move(true);
    CHECK(read.ok());
    CHECK(world.content() == content);
    // If the file system has no direct I/O, the pages pass through staging slots.
    CHECK(read.staged == !world.direct);
    CHECK(read.io_calls == BlockFirstWorld::kBlocks * (world.direct ? 2 : 1));
    if (world.direct) CHECK(world.manager->staging_bytes() == 64 * 4096);
  }
}

TEST_CASE("images are the same whichever way they were written") {
  BlockFirstWorld world(false);
  std::mt19937 random(9);
  for (auto& byte : world.memory) byte = static_cast<unsigned char>(random());
  const auto content = world.content();
  REQUIRE(world.move(false).ok());
  std::memset(world.pool, 0, static_cast<size_t>(BlockFirstWorld::kBlocks * BlockFirstWorld::kStripe));
  // This pool does not begin on a 4 KiB boundary, so its pages pass through staging slots.
  std::vector<unsigned char> other(world.memory.size() + 64);
  auto* base = other.data() + (16 - reinterpret_cast<uintptr_t>(other.data()) % 16) % 16;
  if (reinterpret_cast<uintptr_t>(base) % 4096 == 0) base += 16;
  std::vector<Segment> runs = world.map->runs();
  for (Segment& run : runs) {
    run.base = run.base - reinterpret_cast<uintptr_t>(world.pool) + reinterpret_cast<uintptr_t>(base);
  }
  const KvView view(runs, BlockFirstWorld::kBlocks, BlockFirstWorld::kStripe);
  const PageMap map = PageMap::stripe(
      view, {0, BlockFirstWorld::kStripe, BlockFirstWorld::kStripe, BlockFirstWorld::kImage}, true);
  std::vector<StagedPage> pages;
  for (int64_t i = 0; i < BlockFirstWorld::kBlocks; ++i)
    pages.push_back({i, 0, 0, i * BlockFirstWorld::kImage});
  const TransferReport read = world.manager->transfer(map, pages, true);
  CHECK(read.ok());
  CHECK(read.staged);
  CHECK(std::memcmp(base, content.data(), content.size()) == 0);
}

TEST_CASE(
    "a damaged piece fails its page, and a piece that was not written leaves no image that reads well") {
  constexpr int64_t kVictim = 4 * BlockFirstWorld::kImage;
  for (const bool lanes : {false, true}) {
    BlockFirstWorld damaged(lanes,
                            {{.fault = IoFault::kCorrupt, .write = false, .offset = kVictim, .times = 1}});
    REQUIRE(damaged.move(false).ok());
    const TransferReport report = damaged.move(true);
    REQUIRE(report.failures.size() == 1);
    CHECK(report.failures[0].position == 4);
    CHECK(report.failures[0].reason.find("digest mismatch") != std::string::npos);
    CHECK(damaged.move(true).ok());
  }
  BlockFirstWorld torn(false, {{.fault = IoFault::kShort, .write = true, .offset = kVictim, .times = 1}});
  std::mt19937 random(9);
  for (auto& byte : torn.memory) byte = static_cast<unsigned char>(random());
  CHECK(torn.move(false).failures.size() == 1);
  const TransferReport report = torn.move(true);
  REQUIRE(report.failures.size() == 1);
  CHECK(report.failures[0].position == 4);
}
