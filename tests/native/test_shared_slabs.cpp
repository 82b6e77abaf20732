// Tests two KV groups whose images have different sizes, and whose pages share the slots of one slab. The
// disk lane moves pages between the slab and host memory. The gds lane moves them between the slab and the
// groups' pools, which are in host memory, too.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "gds/gds_lane.h"
#include "gds_world.h"
#include "page_world.h"
#include "storage/disk_lane.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {
namespace {

constexpr int32_t kGroups = 2, kGroupBlocks = 8, kSharedPlaces = 8;
constexpr std::array<int32_t, kGroups> kGroupLayers{4, 2};
constexpr std::array<int64_t, kGroups> kGroupRuns{2304, 3584};  // images of 16 and 12 KiB

// A transfer engine with one slab and one host pool, which both groups use, and a layer-first engine pool per
// group.
struct SharedWorld {
  // `numbers`: the group numbers that the codecs write into their pages.
  explicit SharedWorld(std::array<uint32_t, kGroups> numbers = {0, 1},
                       std::array<int64_t, kGroups> run_bytes = kGroupRuns,
                       std::array<int32_t, kGroups> layers = kGroupLayers) {
    for (size_t g = 0; g < kGroups; ++g) codecs.push_back(page_codec(layers[g], run_bytes[g], numbers[g]));
    const SlabShape shape = make_slab(folder.file("slab"), *codecs[0], kSharedPlaces, 9);
    host = HostPool::create({codecs[0]->image_bytes(), 2 * kGroupBlocks, kMaxExtentBytes}, {});
    REQUIRE(host->wait_ready(2 * kGroupBlocks, kGdsGenerousS));
    const auto slab = std::make_shared<SlabFile>(folder.file("slab"), shape, -1);
    disk = std::make_shared<DiskLane>(
        std::vector<DiskGroup>{{codecs[0], {}, host}, {codecs[1], {}, host}},
        std::vector<std::vector<std::shared_ptr<SlabFile>>>{{slab, slab}},
        DiskOptions{.io = IoBackend::kThreads, .depth = 4, .register_buffers = true});
    const auto files =
        std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("slab")}});
    GdsOptions options;
    options.max_staging_blocks = 3;
    options.deadline_s = options.stuck_s = kLongestWaitS;
    auto manager = std::make_shared<GDSManager>(files, options, host_transform_device(),
                                                std::make_shared<PosixFileIo>(files));
    gds = std::make_shared<GdsLane>(
        std::vector<GdsGroup>{{codecs[0], {{0, shape, 0}}}, {codecs[1], {{0, shape, 0}}}}, 0,
        std::move(manager));
    engine = std::make_unique<TransferEngine>(std::make_shared<HostMover>(), EngineOptions{},
                                              std::vector<std::shared_ptr<Lane>>{disk, gds});
    for (size_t g = 0; g < kGroups; ++g) {
      const int64_t stripe = layers[g] * run_bytes[g];
      pools.emplace_back(static_cast<size_t>(kGroupBlocks * stripe));
      std::vector<Segment> segments;
      for (int32_t layer = 0; layer < layers[g]; ++layer) {
        const auto base = reinterpret_cast<uintptr_t>(pools[g].data() + layer * kGroupBlocks * run_bytes[g]);
        segments.push_back({base, run_bytes[g], run_bytes[g], layer * run_bytes[g], layer});
      }
      views.push_back(std::make_shared<KvView>(segments, kGroupBlocks, stripe));
      engine->attach_view(static_cast<int32_t>(g), views[g], host, 0);
    }
  }
  ~SharedWorld() { CHECK(engine->close(kGdsGenerousS)); }

  // Runs an op on the page numbered `number` in disk slot `place`. A gds op moves engine block `place`, and a
  // disk op host slot `slot`.
  OpResult run(OpKind kind, int32_t group, int32_t place, int32_t number, int32_t slot = 0,
               std::vector<uint64_t> digests = {}) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = kind;
    op.group = group;
    op.places = {place};
    op.digests = std::move(digests);
    const bool straight = kind == OpKind::kGdsRead || kind == OpKind::kGdsWrite;
    if (straight) op.blocks = {place};
    if (kind == OpKind::kDiskRead || kind == OpKind::kDiskWrite) op.slots = {slot};
    add_tag(op, number);
    REQUIRE(engine->wait(submit_op(*engine, std::move(op)), kGdsGenerousS));
    auto results = engine->poll(2);
    REQUIRE(results.size() == 1);
    return std::move(results.front());
  }
  // Writes a page from the group's pool to the slab without using host memory, and then writes its trailer.
  void store(int32_t group, int32_t place, int32_t number) {
    OpResult written = run(OpKind::kGdsWrite, group, place, number);
    REQUIRE(written.status == Status::kOk);
    REQUIRE(run(OpKind::kDiskSeal, group, place, number, 0, std::move(written.digests)).status ==
            Status::kOk);
  }
  void fill(uint8_t value) {
    for (size_t g = 0; g < kGroups; ++g) {
      std::fill(pools[g].begin(), pools[g].end(), static_cast<uint8_t>(value + g));
    }
  }
  // Whether every byte of the group's block is `value`.
  bool holds(int32_t group, int32_t block, uint8_t value) const {
    const auto& runs = views[static_cast<size_t>(group)]->runs();
    return std::all_of(runs.begin(), runs.end(), [&](const Segment& run) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(run_address(run, block));
      return std::all_of(bytes, bytes + run.run_bytes, [=](uint8_t byte) { return byte == value; });
    });
  }
  int64_t missed(PageMiss miss) const {
    const auto at = static_cast<size_t>(miss);
    return gds->counts().misses[at] + disk->counts(0).misses[at];
  }

  TemporaryFolder folder;
  std::vector<std::shared_ptr<const PageCodec>> codecs;
  std::vector<std::vector<unsigned char>> pools;
  std::vector<std::shared_ptr<KvView>> views;
  std::shared_ptr<HostPool> host;
  std::shared_ptr<DiskLane> disk;
  std::shared_ptr<GdsLane> gds;
  std::unique_ptr<TransferEngine> engine;
  int64_t next_op = 1;
};

}  // namespace

TEST_CASE("two groups that share a slab come back by either lane, each in its own slots") {
  SharedWorld world;
  REQUIRE(world.codecs[1]->image_bytes() < world.codecs[0]->image_bytes());
  world.fill(7);
  for (int32_t place = 0; place < kSharedPlaces; ++place) world.store(place % kGroups, place, place);
  world.fill(0);
  for (int32_t place = 0; place < kSharedPlaces; ++place) {
    const int32_t group = place % kGroups;
    CHECK(world.run(OpKind::kGdsRead, group, place, place).status == Status::kOk);
    CHECK(world.holds(group, place, static_cast<uint8_t>(7 + group)));
    CHECK(world.run(OpKind::kDiskRead, group, place, place, place).status == Status::kOk);
    // Writes the page from host memory to another slot of the slab, and reads it from there into the group's
    // pool.
    const int32_t other = (place + kGroups) % kSharedPlaces;
    CHECK(world.run(OpKind::kDiskWrite, group, other, place, place).status == Status::kOk);
    world.fill(0);
    CHECK(world.run(OpKind::kGdsRead, group, other, place).status == Status::kOk);
    CHECK(world.holds(group, other, static_cast<uint8_t>(7 + group)));
    world.fill(7);
    world.store(group, other, other);
  }
}

TEST_CASE("a page of one group in a shared slab is a miss for the other, by either lane") {
  for (const OpKind read : {OpKind::kGdsRead, OpKind::kDiskRead}) {
    SharedWorld world;
    world.fill(3);
    world.store(0, 2, 5);
    world.store(1, 3, 6);
    for (const auto& [group, place, number] : {std::tuple{1, 2, 5}, std::tuple{0, 3, 6}}) {
      const OpResult result = world.run(read, group, place, number);
      CHECK(result.failed == std::vector<int32_t>{0});
      CHECK(result.causes == std::vector<FailureCause>{FailureCause::kContent});
      CHECK(world.run(read, 1 - group, place, number).status == Status::kOk);
    }
    // Overwrites group 0's larger image with a smaller one of group 1. The larger image's trailer stays
    // intact behind the smaller image.
    world.store(1, 2, 7);
    CHECK(world.run(read, 0, 2, 5).failed.size() == 1);
    CHECK(world.missed(PageMiss::kData) == 1);
    CHECK(world.run(read, 1, 2, 7).status == Status::kOk);
  }
}

TEST_CASE("where images are alike the group in the trailer alone tells two groups apart") {
  for (const uint32_t second : {1U, 0U}) {
    SharedWorld world({0, second}, {kGroupRuns[0], kGroupRuns[0]}, {kGroupLayers[0], kGroupLayers[0]});
    world.fill(1);
    world.store(1, 4, 4);
    for (const OpKind read : {OpKind::kGdsRead, OpKind::kDiskRead}) {
      // Control: if both groups have the same number, a read for one group accepts the other group's page.
      CHECK((world.run(read, 0, 4, 4).status == Status::kOk) == (second == 0));
    }
    CHECK(world.missed(PageMiss::kGroup) == (second == 0 ? 0 : 2));
  }
}

TEST_CASE("lanes refuse slots that are not as large as the largest image of the groups that share them") {
  SharedWorld world;
  const SlabShape small = make_slab(world.folder.file("small"), *world.codecs[1], kSharedPlaces, 10);
  const auto slab = std::make_shared<SlabFile>(world.folder.file("small"), small, -1);
  CHECK_THROWS_AS(DiskLane({{world.codecs[0], {}, world.host}, {world.codecs[1], {}, world.host}},
                           {{slab, slab}}, DiskOptions{}),
                  GeometryError);
  const auto files =
      std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{world.folder.file("small")}});
  const auto manager = std::make_shared<GDSManager>(files, GdsOptions{}, host_transform_device(),
                                                    std::make_shared<PosixFileIo>(files));
  CHECK_THROWS_AS(
      GdsLane({{world.codecs[0], {{0, small, 0}}}, {world.codecs[1], {{0, small, 0}}}}, 0, manager),
      GeometryError);
  CHECK_NOTHROW(GdsLane({{world.codecs[1], {{0, small, 0}}}}, 0, manager));
}

}  // namespace flexkv
