// The disk lane under a transfer engine: many ops at once on two disks, one of which fails or hangs.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "io/io_queue.h"
#include "page_world.h"
#include "storage/disk_lane.h"
#include "testing/counting_mover.h"
#include "testing/faulty_queue.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {
namespace {

constexpr int32_t kDisks = 2;
constexpr int32_t kPlaces = 64;
constexpr int32_t kSlots = 128;
constexpr int32_t kLayers = 3;
constexpr int64_t kRunBytes = 2304;  // not a multiple of a sector, so layers share some

std::vector<IoBackend> backends() {
  std::vector<IoBackend> found{IoBackend::kThreads};
  if (uring_refusal().empty()) found.push_back(IoBackend::kUring);
  return found;
}

struct DiskWorld {
  explicit DiskWorld(IoBackend io, std::vector<IoFaultRule> rules = {}, double stuck_s = 30.0)
      : faults(std::make_shared<IoFaults>(std::move(rules))) {
    codec = page_codec(kLayers, kRunBytes);
    pool = HostPool::create({codec->image_bytes(), kSlots, kMaxExtentBytes}, {});
    REQUIRE(pool->wait_ready(kSlots, kWaitS));
    std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
    for (int32_t disk = 0; disk < kDisks; ++disk) {
      const std::string path = "slab" + std::to_string(disk);
      const SlabShape shape = make_slab(path, *codec, kPlaces / kDisks, static_cast<uint64_t>(disk) + 1);
      slabs.push_back({std::make_shared<SlabFile>(path, shape, -1)});
    }
    std::vector<DiskGroup> groups;
    groups.push_back({codec, {}, pool});
    const WrapQueue wrap = [faults = faults](std::unique_ptr<IoQueue> queue, int32_t disk) {
      return std::make_unique<FaultyQueue>(std::move(queue), faults, disk);
    };
    lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs), DiskOptions{io, 8, stuck_s}, wrap);
    engine = std::make_unique<TransferEngine>(std::make_shared<HostMover>(), EngineOptions{},
                                              std::vector<std::shared_ptr<Lane>>{lane});
  }
  ~DiskWorld() {
    faults->release();
    CHECK(engine->close(kWaitS));
    for (int32_t disk = 0; disk < kDisks; ++disk) std::remove(("slab" + std::to_string(disk)).c_str());
  }

  void fill(int32_t slot, uint8_t value) {
    std::fill_n(reinterpret_cast<uint8_t*>(pool->slot(slot)), kLayers * kRunBytes, value);
  }
  bool holds(int32_t slot, uint8_t value) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(pool->slot(slot));
    return std::all_of(bytes, bytes + kLayers * kRunBytes, [=](uint8_t byte) { return byte == value; });
  }
  // Submits pages [first, first + count): places of the same numbers, from or to slots `base` further on.
  int64_t submit(OpKind kind, int32_t first, int32_t count, int32_t base, bool layerwise = false) {
    OpSpec op;
    op.op_id = next_op++;
    op.kind = kind;
    op.priority = kind == OpKind::kDiskRead ? Priority::kLoad : Priority::kStore;
    op.layerwise = layerwise;
    for (int32_t i = first; i < first + count; ++i) {
      op.slots.push_back(base + i);
      op.places.push_back(i);
      add_tag(op, i);
    }
    return submit_op(*engine, std::move(op));
  }
  std::vector<OpResult> results(size_t count) {
    std::vector<OpResult> found;
    for (int64_t ticket = 1; ticket < next_op; ++ticket) REQUIRE(engine->wait(ticket, kWaitS));
    while (found.size() < count) {
      auto more = engine->poll(count);
      REQUIRE(!more.empty());
      std::move(more.begin(), more.end(), std::back_inserter(found));
    }
    return found;
  }

  std::shared_ptr<IoFaults> faults;
  std::shared_ptr<const PageCodec> codec;
  std::shared_ptr<HostPool> pool;
  std::shared_ptr<DiskLane> lane;
  std::unique_ptr<TransferEngine> engine;
  int64_t next_op = 1;
};

}  // namespace

TEST_CASE("pages of many ops at once come back whole, by pages and by layers") {
  for (const IoBackend io : backends()) {
    DiskWorld world(io);
    for (int32_t i = 0; i < kPlaces; ++i) world.fill(i, static_cast<uint8_t>(i + 1));
    for (int32_t i = 0; i < kPlaces; i += 4) world.submit(OpKind::kDiskWrite, i, 4, 0);
    for (const OpResult& result : world.results(kPlaces / 4)) CHECK(result.status == Status::kOk);
    for (int32_t i = 0; i < kPlaces; i += 8) world.submit(OpKind::kDiskRead, i, 8, kPlaces, i % 16 == 0);
    for (const OpResult& result : world.results(kPlaces / 8)) {
      CHECK(result.status == Status::kOk);
      CHECK(result.reason.empty());
    }
    for (int32_t i = 0; i < kPlaces; ++i) CHECK(world.holds(kPlaces + i, static_cast<uint8_t>(i + 1)));
  }
}

TEST_CASE("a load on another engine copies each page when the disk has brought it up and it verified") {
  for (const IoBackend io : backends()) {
    DiskWorld world(io);
    for (int32_t i = 0; i < kPlaces; ++i) world.fill(i, static_cast<uint8_t>(i + 1));
    world.submit(OpKind::kDiskWrite, 0, kPlaces, 0);
    CHECK(world.results(1).front().status == Status::kOk);
    // Disk 0 hangs; the page at place 5, on disk 1, is damaged.
    IoFaultRule hang;
    hang.action = IoFaultAction::kStall;
    hang.disk = 0;
    world.faults->add(hang);
    const int fd = open("slab1", O_RDWR);
    const off_t middle = 4096 + 5 / kDisks * world.codec->image_bytes() + kRunBytes;
    const char damage = 0x55;
    REQUIRE(pwrite(fd, &damage, 1, middle) == 1);
    close(fd);

    std::vector<std::byte> memory(static_cast<size_t>(kPlaces * kLayers * kRunBytes));
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data() + layer * kPlaces * kRunBytes), kRunBytes,
                      kRunBytes, layer * kRunBytes, layer});
    }
    const auto view = std::make_shared<KvView>(runs, kPlaces, kLayers * kRunBytes);
    const auto copies = std::make_shared<CountingMover>(std::make_shared<HostMover>());
    TransferEngine device(copies, EngineOptions{});
    device.attach_view(0, view, world.pool, 0);
    const auto arrived = [&](int32_t block) {
      return std::all_of(runs.begin(), runs.end(), [&](const Segment& run) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(run_address(run, block));
        return std::all_of(bytes, bytes + kRunBytes, [=](uint8_t byte) { return byte == block + 1; });
      });
    };
    OpSpec load;
    load.op_id = 1;
    for (int32_t i = 0; i < kPlaces; ++i) {
      load.blocks.push_back(i);
      load.slots.push_back(kPlaces + i);
      load.reads.push_back(world.next_op);  // the read that is submitted after the load
    }
    GraphSpec graph;
    graph.ops.push_back(load);
    const auto ticket = device.submit(std::move(graph));
    REQUIRE(ticket);
    const int64_t read = world.submit(OpKind::kDiskRead, 0, kPlaces, kPlaces);
    const auto deadline = deadline_in(kWaitS);
    while (world.lane->counts(1).read_pages < kPlaces / kDisks - 1) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
    REQUIRE(world.faults->wait_stalled(1, kWaitS));
    // The read has not ended, but the other disk's pages are loaded.
    while (copies->count(OpKind::kH2D).moves < kPlaces / kDisks - 1) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
    CHECK(!world.engine->wait(read, 0));
    CHECK(!device.wait(*ticket, 0));
    world.faults->release();
    REQUIRE(device.wait(*ticket, kWaitS));
    const OpResult result = device.poll(1).front();
    CHECK(result.status == Status::kFailed);
    CHECK(result.failed == std::vector<int32_t>{5});
    for (int32_t i = 0; i < kPlaces; ++i) CHECK(arrived(i) == (i != 5));
    CHECK(world.results(1).front().failed == std::vector<int32_t>{5});
    CHECK(device.close(kWaitS));
  }
}

TEST_CASE("reads that no disk takes fail the loads that wait for them") {
  DiskWorld world(IoBackend::kThreads);
  for (int32_t disk = 0; disk < kDisks; ++disk) world.lane->take_out(disk, "a test");
  const int64_t read = world.next_op;
  world.submit(OpKind::kDiskRead, 0, 2, 0);
  CHECK(world.results(1).front().failed.size() == 2);
  for (int32_t slot = 0; slot < 2; ++slot) {
    CHECK(world.pool->slot_arrivals().look(slot, read).failed);
    CHECK(world.pool->slot_arrivals().look(slot, read + 1).layers == 0);
    CHECK(!world.pool->slot_arrivals().look(slot, read + 1).failed);
  }
}

TEST_CASE("a disk that fails is taken out while ops are queued, and the other serves") {
  for (const IoBackend io : backends()) {
    IoFaultRule broken;
    broken.write = true;
    broken.disk = 1;
    broken.nth = 5;
    broken.error = 30;  // EROFS
    DiskWorld world(io, {broken});
    for (int32_t i = 0; i < kPlaces; i += 4) world.submit(OpKind::kDiskWrite, i, 4, 0);
    for (const OpResult& result : world.results(kPlaces / 4)) {
      for (const int32_t page : result.failed) CHECK(page % 2 == 1);  // places alternate between the disks
    }
    CHECK(world.lane->states()[1].lost);
    CHECK(!world.lane->states()[0].lost);
  }
}

TEST_CASE("a hung disk is found, its queue ends, and its I/O ends when it is let go") {
  for (const IoBackend io : backends()) {
    IoFaultRule hang;
    hang.action = IoFaultAction::kStall;
    hang.disk = 0;
    // Long enough for the other disk, even on a busy machine under a sanitizer.
    DiskWorld world(io, {hang}, 6.0);
    const int64_t ticket = world.submit(OpKind::kDiskWrite, 0, kPlaces, 0);
    REQUIRE(world.faults->wait_stalled(1, kWaitS));
    const auto deadline = deadline_in(kWaitS);
    while (!world.lane->states()[0].lost) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
    CHECK(!world.engine->wait(ticket, 0));
    world.faults->release();
    const OpResult result = world.results(1).front();
    CHECK(result.failed.size() == kPlaces / kDisks);
    CHECK(!world.lane->states()[1].lost);
  }
}

TEST_CASE("any flipped bit of an image is found") {
  DiskWorld world(IoBackend::kThreads);
  std::vector<std::byte> image(static_cast<size_t>(world.codec->image_bytes()));
  PageTag tag;
  tag.generation = 9;
  const PagePlace place{1, 2};
  world.codec->seal(image.data(), place, tag, 5);
  const auto whole = [&] {
    return world.codec->check_trailer(image.data(), place, tag, 0).miss == PageMiss::kNone &&
           world.codec->check_runs(image.data()).miss == PageMiss::kNone;
  };
  REQUIRE(whole());
  const auto trailer = static_cast<size_t>(world.codec->image().trailer_offset());
  const auto end = trailer + static_cast<size_t>(world.codec->image().trailer_bytes());
  for (size_t at = 0; at < end; at += at < trailer ? 37 : 1) {
    if (at >= kLayers * kRunBytes && at < trailer) continue;  // padding does not count
    image[at] ^= std::byte{4};
    CHECK(!whole());
    image[at] ^= std::byte{4};
  }
  CHECK(whole());
}

}  // namespace flexkv
