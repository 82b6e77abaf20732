// Tests a transfer engine with a disk lane on two disks, with many ops at once, while one of the disks fails
// or hangs.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "disk_lane_world.h"
#include "testing/counting_mover.h"

namespace flexkv {

TEST_CASE("pages of many ops at once come back whole, by pages and by layers") {
  for (const IoBackend io : disk_backends()) {
    DiskWorld world(io);
    for (int32_t i = 0; i < kWorldPlaces; ++i) world.fill(i, static_cast<uint8_t>(i + 1));
    for (int32_t i = 0; i < kWorldPlaces; i += 4) world.submit(OpKind::kDiskWrite, i, 4, 0);
    for (const OpResult& result : world.results(kWorldPlaces / 4)) CHECK(result.status == Status::kOk);
    for (int32_t i = 0; i < kWorldPlaces; i += 8)
      world.submit(OpKind::kDiskRead, i, 8, kWorldPlaces, i % 16 == 0);
    for (const OpResult& result : world.results(kWorldPlaces / 8)) {
      CHECK(result.status == Status::kOk);
      CHECK(result.reason.empty());
    }
    for (int32_t i = 0; i < kWorldPlaces; ++i)
      CHECK(world.holds(kWorldPlaces + i, static_cast<uint8_t>(i + 1)));
  }
}

TEST_CASE("a load on another engine copies each page when the disk has brought it up and it verified") {
  for (const IoBackend io : disk_backends()) {
    DiskWorld world(io);
    for (int32_t i = 0; i < kWorldPlaces; ++i) world.fill(i, static_cast<uint8_t>(i + 1));
    world.submit(OpKind::kDiskWrite, 0, kWorldPlaces, 0);
    CHECK(world.results(1).front().status == Status::kOk);
    // Disk 0 hangs, and the page in disk slot 5, on disk 1, is damaged.
    IoFaultRule hang;
    hang.action = IoFaultAction::kStall;
    hang.disk = 0;
    world.faults->add(hang);
    const int fd = open("slab1", O_RDWR);
    const off_t middle = 4096 + 5 / kWorldDisks * world.codec->image_bytes() + kWorldRun;
    const char damage = 0x55;
    REQUIRE(pwrite(fd, &damage, 1, middle) == 1);
    close(fd);

    std::vector<std::byte> memory(static_cast<size_t>(kWorldPlaces * kWorldLayers * kWorldRun));
    std::vector<Segment> runs;
    for (int32_t layer = 0; layer < kWorldLayers; ++layer) {
      runs.push_back({reinterpret_cast<uintptr_t>(memory.data() + layer * kWorldPlaces * kWorldRun),
                      kWorldRun, kWorldRun, layer * kWorldRun, layer});
    }
    const auto view = std::make_shared<KvView>(runs, kWorldPlaces, kWorldLayers * kWorldRun);
    const auto copies = std::make_shared<CountingMover>(std::make_shared<HostMover>());
    TransferEngine device(copies, EngineOptions{});
    device.attach_view(0, view, world.pool, 0);
    const auto arrived = [&](int32_t block) {
      return std::all_of(runs.begin(), runs.end(), [&](const Segment& run) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(run_address(run, block));
        return std::all_of(bytes, bytes + kWorldRun, [=](uint8_t byte) { return byte == block + 1; });
      });
    };
    OpSpec load;
    load.op_id = 1;
    for (int32_t i = 0; i < kWorldPlaces; ++i) {
      load.blocks.push_back(i);
      load.slots.push_back(kWorldPlaces + i);
      load.reads.push_back(world.next_op);  // the read that is submitted below
    }
    GraphSpec graph;
    graph.ops.push_back(load);
    const auto ticket = device.submit(std::move(graph));
    REQUIRE(ticket);
    const int64_t read = world.submit(OpKind::kDiskRead, 0, kWorldPlaces, kWorldPlaces);
    const auto deadline = deadline_in(kWaitS);
    while (world.lane->counts(1).read_pages < kWorldPlaces / kWorldDisks - 1) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
    REQUIRE(world.faults->wait_stalled(1, kWaitS));
    // The read has not finished, because disk 0 hangs. But the pages of disk 1 get loaded.
    while (copies->count(OpKind::kH2D).moves < kWorldPlaces / kWorldDisks - 1) {
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
    for (int32_t i = 0; i < kWorldPlaces; ++i) CHECK(arrived(i) == (i != 5));
    CHECK(world.results(1).front().failed == std::vector<int32_t>{5});
    CHECK(device.close(kWaitS));
  }
}

TEST_CASE("reads that no disk takes fail the loads that wait for them") {
  DiskWorld world(IoBackend::kThreads);
  for (int32_t disk = 0; disk < kWorldDisks; ++disk) world.lane->take_out(disk, "a test");
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
  for (const IoBackend io : disk_backends()) {
    IoFaultRule broken;
    broken.write = true;
    broken.disk = 1;
    broken.nth = 5;
    broken.error = 30;  // EROFS
    DiskWorld world(io, {broken});
    for (int32_t i = 0; i < kWorldPlaces; i += 4) world.submit(OpKind::kDiskWrite, i, 4, 0);
    for (const OpResult& result : world.results(kWorldPlaces / 4)) {
      for (const int32_t page : result.failed) CHECK(page % 2 == 1);  // odd disk slots are on disk 1
    }
    CHECK(world.lane->states()[1].lost);
    CHECK(!world.lane->states()[0].lost);
  }
}

TEST_CASE("a hung disk is found, its queue ends, and its I/O ends when it is let go") {
  for (const IoBackend io : disk_backends()) {
    IoFaultRule hang;
    hang.action = IoFaultAction::kStall;
    hang.disk = 0;
    // The disk that does not hang finishes within 6 s, even on a busy machine with a sanitizer.
    DiskWorld world(io, {hang}, 6.0);
    const int64_t ticket = world.submit(OpKind::kDiskWrite, 0, kWorldPlaces, 0);
    REQUIRE(world.faults->wait_stalled(1, kWaitS));
    const auto deadline = deadline_in(kWaitS);
    while (!world.lane->states()[0].lost) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
    CHECK(!world.engine->wait(ticket, 0));
    world.faults->release();
    const OpResult result = world.results(1).front();
    CHECK(result.failed.size() == kWorldPlaces / kWorldDisks);
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
    if (at >= kWorldLayers * kWorldRun && at < trailer) continue;  // padding has no digest
    image[at] ^= std::byte{4};
    CHECK(!whole());
    image[at] ^= std::byte{4};
  }
  CHECK(whole());
}

}  // namespace flexkv
