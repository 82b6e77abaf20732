// Before its first transfer, a manager reads each file once, to learn which route cuFile uses for the file.
// These tests use disks that do not answer this read.
#include <future>
#include <thread>

#include "base/error.h"
#include "fake_cufile.h"
#include "testing/stall_gate.h"

using namespace flexkv;

namespace {

// Unit: bytes. The size of a file, larger than the staging buffers of a CufileWorld.
constexpr size_t kFileBytes = size_t{1} << 20;

template <typename Answer>
bool came(const std::future<Answer>& answer) {
  return answer.wait_for(to_duration(kGdsGenerousS)) == std::future_status::ready;
}

// A CufileWorld whose disks hold every read until `disk` is released, and a manager that uses them. Call
// reset_fake() first.
struct SilentDisks {
  explicit SilentDisks(double stuck_s) {
    fill_files(world, kFileBytes);
    fake.before_move = [this] { disk.hold(); };
    GdsOptions options;
    options.max_staging_blocks = 3;
    options.stuck_s = stuck_s;
    manager = std::make_shared<GDSManager>(world.files, options, host_transform_device(), world.io);
  }
  ~SilentDisks() {
    disk.release();
    // After the read has dropped its reference to `io`, two references remain: that of the world and that of
    // its manager.
    const auto deadline = deadline_in(kGdsGenerousS);
    while (world.io.use_count() > 1 + 1 && seconds_until(deadline) > 0) std::this_thread::yield();
    CHECK(world.io.use_count() <= 1 + 1);
    fake.before_move = nullptr;
  }

  CufileWorld world;
  StallGate disk;
  std::shared_ptr<GDSManager> manager;
};

}  // namespace

TEST_CASE("cufile looks: a disk that does not answer holds up nobody, and is an error after its deadline") {
  reset_fake();
  SilentDisks silent(1);
  GDSManager& manager = *silent.manager;
  auto reserved = std::async(std::launch::async, [&] {
    try {
      manager.reserve_staging(*silent.world.world.map, GdsWorld::pages());
    } catch (const DiskError& error) {
      return std::string(error.what());
    }
    return std::string("reserved");
  });
  REQUIRE(silent.disk.wait_held(1, kGdsGenerousS));
  auto asked = std::async(std::launch::async, [&] {
    manager.cancel();
    return manager.describe() + manager.direct_refusal() + std::to_string(manager.totals().transfers) +
           std::to_string(manager.staging_bytes() + manager.staging_slots().slots);
  });
  CHECK(came(asked));
  CHECK(came(reserved));
  auto closed = std::async(std::launch::async, [&] { manager.close(); });
  CHECK(came(closed));
  silent.disk.release();
  CHECK(reserved.get().find(silent.world.files->at(0, 0).path + " has not ended") != std::string::npos);
  asked.get();
  closed.get();
}

TEST_CASE("cufile looks: a manager out of service for a disk takes no transfers") {
  reset_fake();
  SilentDisks silent(0.1);
  GDSManager& manager = *silent.manager;
  auto moved = std::async(std::launch::async, [&] {
    return manager.transfer(*silent.world.world.map, GdsWorld::pages(), false);
  });
  REQUIRE(silent.disk.wait_held(1, kGdsGenerousS));
  CHECK(came(moved));
  CHECK(manager.down_reason().find("has not ended") != std::string::npos);
  CHECK(manager.staging_bytes() == 0);
  silent.disk.release();
  const TransferReport report = moved.get();
  REQUIRE(report.failures.size() == GdsWorld::kBlocks);
  CHECK(report.failures[0].status == Status::kLaneDown);
  CHECK_THROWS_AS(manager.reserve_staging(*silent.world.world.map, GdsWorld::pages()), DiskError);
  manager.close();
}

TEST_CASE("cufile looks: they are larger than what cuFile reads by POSIX calls for being small") {
  for (const auto& [below, direct] : {std::pair{size_t{65536}, true}, {kFileBytes, false}}) {
    CAPTURE(below);
    reset_fake();
    fake.posix_below = below;
    CufileWorld c;
    fill_files(c, kFileBytes);
    c.manager->reserve_staging(*c.world.map, GdsWorld::pages());
    CHECK((c.io->name().find("GPUDirect Storage (") != std::string::npos) == direct);
    CHECK(c.manager->direct_refusal().empty() == direct);
  }
}
