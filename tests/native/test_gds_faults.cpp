// Tests transfers with disks and devices that fail: the report lists the failed pages, all other pages are
// good, nothing leaks, and the next transfer succeeds.
#include <doctest/doctest.h>

#include <thread>

#include "base/error.h"
#include "gds/uring_file_io.h"
#include "gds_world.h"

using namespace flexkv;

namespace {

using Names = std::vector<std::string>;
using Paths = std::vector<Names>;

// Checks that only page `position` failed, with `words` in its reason, and that no I/O is in flight.
template <typename World>
void check_one_failure(const World& world, const TransferReport& report, int32_t position,
                       const char* words) {
  REQUIRE(report.failures.size() == 1);
  CHECK(report.failures[0].position == position);
  CHECK(report.failures[0].status == Status::kFailed);
  CHECK_MESSAGE(report.failures[0].reason.find(words) != std::string::npos, report.failures[0].reason);
  CHECK(world.io->in_flight() == 0);
}

template <typename World>
void check_blocks(const World& world, const std::vector<unsigned char>& content, int32_t except) {
  for (int32_t block = 0; block < GdsWorld::kBlocks; ++block) {
    if (block == except) continue;
    CAPTURE(block);
    bool same = true;
    for (int32_t layer = 0; layer < GdsWorld::kLayers; ++layer) {
      const int64_t at = (layer * GdsWorld::kBlocks + block) * GdsWorld::kRun;
      same = same && std::memcmp(world.pool.data() + at, content.data() + at, GdsWorld::kRun) == 0;
    }
    CHECK(same);
  }
}

// The number of the block whose I/O fails. Block 7 is in image 3 of disk 1.
constexpr int32_t kVictim = 7;
FileFaultRule on_victim(IoFault fault, bool write, std::string reason = "Input/output error") {
  return {.fault = fault,
          .write = write,
          .offset = 3 * GdsWorld::kImage,
          .device = 1,
          .reason = std::move(reason),
          .times = 1};
}

}  // namespace

TEST_CASE_TEMPLATE("a store and a load bring every byte back, through fewer slots than blocks", Io,
                   PosixFileIo, UringFileIo) {
  GdsWorldOf<Io> world;
  const auto content = world.stored();
  const TransferReport report = world.move(true);
  CHECK(report.ok());
  CHECK(report.staged);
  CHECK(report.io_calls == GdsWorld::kBlocks);
  CHECK(world.pool == content);
  CHECK(world.manager->staging_bytes() == 3 * GdsWorld::kImage);
}

TEST_CASE_TEMPLATE("a call that fails or comes short fails its page by name, and only that one", Io,
                   PosixFileIo, UringFileIo) {
  struct Example {
    IoFault fault;
    bool write;
    std::string reason;
    const char* words;
  };
  const std::vector<Example> examples{{IoFault::kFail, false, "Input/output error", "Input/output error"},
                                      {IoFault::kFail, true, "Input/output error", "Input/output error"},
                                      {IoFault::kFail, true, "No space left on device", "No space left"},
                                      {IoFault::kShort, false, "", "short"},
                                      {IoFault::kShort, true, "", "short"},
                                      {IoFault::kCorrupt, false, "", "digest mismatch in run"}};
  for (const Example& example : examples) {
    CAPTURE(example.words);
    CAPTURE(example.write);
    GdsWorldOf<Io> world(example.write ? std::vector<FileFaultRule>{}
                                       : std::vector{on_victim(example.fault, false, example.reason)});
    if (example.write) {
      GdsWorldOf<Io> failing({on_victim(example.fault, true, example.reason)});
      failing.fill(7);
      const auto content = failing.pool;
      check_one_failure(failing, failing.move(false), kVictim, example.words);
      CHECK(failing.move(false).ok());
      std::memset(failing.pool.data(), 0, failing.pool.size());
      CHECK(failing.move(true).ok());
      CHECK(failing.pool == content);
      continue;
    }
    const auto content = world.stored();
    check_one_failure(world, world.move(true), kVictim, example.words);
    check_blocks(world, content, kVictim);
    CHECK(world.move(true).ok());
    CHECK(world.pool == content);
  }
}

TEST_CASE_TEMPLATE("bytes damaged on their way to the disk are found when they are read", Io, PosixFileIo,
                   UringFileIo) {
  GdsWorldOf<Io> world({on_victim(IoFault::kCorrupt, true)});
  const auto content = world.stored();
  check_one_failure(world, world.move(true), kVictim, "digest mismatch");
  check_blocks(world, content, kVictim);
}

TEST_CASE_TEMPLATE("a slow disk is waited for", Io, PosixFileIo, UringFileIo) {
  GdsWorldOf<Io> world({{.fault = IoFault::kDelay, .device = 0, .delay_s = 0.02}});
  const auto content = world.stored();
  CHECK(world.move(true).ok());
  CHECK(world.pool == content);
  CHECK(world.io->acted() == GdsWorld::kBlocks);
}

TEST_CASE_TEMPLATE(
    "a device's error fails the batch's pages; a thread that cannot reach the device fails its own", Io,
    PosixFileIo, UringFileIo) {
  GdsWorldOf<Io> world;
  const auto content = world.stored();
  world.device->fail_batches(2);
  const TransferReport report = world.move(true);
  CHECK(report.failures.size() == 2);  // on a host device each batch has one page, so two batches fail
  for (const PageFailure& failure : report.failures)
    CHECK(failure.reason.find("CUDA error 719") != std::string::npos);
  CHECK(world.move(true).ok());
  CHECK(world.pool == content);

  GdsWorldOf<Io> unreachable;
  unreachable.device->fail_threads(true);
  const TransferReport none = unreachable.move(false);
  CHECK(none.failures.size() == GdsWorld::kBlocks);
  CHECK(none.failures[0].reason.find("CUDA error 101") != std::string::npos);
}

TEST_CASE_TEMPLATE("staging that cannot be had is an error, and later transfers try again", Io, PosixFileIo,
                   UringFileIo) {
  GdsWorldOf<Io> world;
  world.device->fail_allocation(true);
  CHECK_THROWS_AS(world.move(false), CapacityError);
  world.device->fail_allocation(false);
  CHECK(world.move(false).ok());
}

TEST_CASE_TEMPLATE("staging is reserved before the first transfer, or that is an error", Io, PosixFileIo,
                   UringFileIo) {
  GdsWorldOf<Io> world;
  world.device->fail_allocation(true);
  std::string words;
  try {
    world.manager->reserve_staging(*world.map, world.pages(2));
  } catch (const CapacityError& error) {
    words = error.what();
  }
  CHECK(words.find("CUDA error 2; 3 staging slots of 24576 bytes") != std::string::npos);
  CHECK(words.find("gds.max_staging_blocks") != std::string::npos);
  CHECK(world.manager->staging_bytes() == 0);

  world.device->fail_allocation(false);
  world.manager->reserve_staging(*world.map, world.pages(2));
  CHECK(world.manager->staging_bytes() == 3 * GdsWorld::kImage);
  CHECK(world.manager->staging_slots().slots == 3);
  CHECK(world.io->in_flight() == 0);
  CHECK(world.move(false).ok());
  CHECK(world.device->allocated() == 1);

  world.manager->close();
  CHECK_THROWS_AS(world.manager->reserve_staging(*world.map, world.pages(2)), ClosedError);
}

TEST_CASE("a manager without staging has no staging slots, however it lost it") {
  GdsOptions options;
  options.stuck_s = 2.0;
  GdsWorld world({{.fault = IoFault::kStall, .write = false}}, options);
  const auto check_slots = [&](int64_t slots, int64_t slot_bytes) {
    CHECK(world.manager->staging_slots().slots == slots);
    CHECK(world.manager->staging_slots().slot_bytes == slot_bytes);
    CHECK(world.manager->staging_bytes() == slots * slot_bytes);
  };
  check_slots(0, 0);
  world.manager->reserve_staging(*world.map, world.pages(2));
  check_slots(3, GdsWorld::kImage);

  SUBCASE("blocks that need more could not have it") {
    const int64_t larger = 2 * GdsWorld::kImage;
    const PageMap large =
        PageMap::stripe(*world.view, {0, GdsWorld::kDigestOffset, GdsWorld::kDigestOffset, larger}, true);
    world.device->fail_allocation(true);
    CHECK_THROWS_AS(world.manager->reserve_staging(large, world.pages(2)), CapacityError);
    check_slots(0, 0);
    world.device->fail_allocation(false);
    world.manager->reserve_staging(large, world.pages(2));
    check_slots(3, larger);
  }
  SUBCASE("I/O that never ends has kept it") {
    CHECK(world.move(true).stuck);
    check_slots(0, 0);
    world.io->release();
  }
  SUBCASE("it was closed") {
    world.manager->close();
    check_slots(0, 0);
  }
}

TEST_CASE("staging holds no more than one transfer moves") {
  GdsOptions options;
  options.most_transfer_bytes = GdsWorld::kImage;  // at most two slots
  GdsWorld world({}, options);
  world.manager->reserve_staging(*world.map, world.pages(2));
  CHECK(world.manager->staging_slots().slots == 2);
  CHECK(world.move(false).ok());
  CHECK(world.manager->staging_bytes() == 2 * GdsWorld::kImage);
}

TEST_CASE_TEMPLATE("cancel drops what was not issued, and returns when the rest has stopped moving", Io,
                   PosixFileIo, UringFileIo) {
  for (const bool is_read : {true, false}) {
    CAPTURE(is_read);
    GdsWorldOf<Io> world({{.fault = IoFault::kStall, .write = !is_read}});
    if (is_read) {
      // Another manager, whose disks do not stall, writes the images.
      GdsWorldOf<Io> maker;
      maker.stored();
      for (const char* disk : {"0", "1"}) {
        std::filesystem::copy_file(maker.folder.file(disk), world.folder.file(disk),
                                   std::filesystem::copy_options::overwrite_existing);
      }
    } else {
      world.fill(7);
    }
    TransferReport report;
    std::thread transfer([&] { report = world.move(is_read); });
    REQUIRE(world.io->wait_stalled(3, kGdsGenerousS));
    world.manager->cancel();
    world.io->release();
    transfer.join();
    // The engine may reuse the transfer's blocks as soon as the transfer has returned, so no bytes may arrive
    // after that.
    CHECK(world.io->in_flight() == 0);
    std::memset(world.pool.data(), 0x5A, world.pool.size());
    const auto reused = world.pool;
    CHECK(report.failures.size() >= GdsWorld::kBlocks - 3);
    for (const PageFailure& failure : report.failures) CHECK(failure.status == Status::kCancelled);
    CHECK(world.move(false).ok());
    CHECK(world.pool == reused);
    std::memset(world.pool.data(), 0, world.pool.size());
    CHECK(world.move(true).ok());
    CHECK(world.pool == reused);
  }
}

TEST_CASE_TEMPLATE("after the deadline pages that were not issued fail, and say so", Io, PosixFileIo,
                   UringFileIo) {
  GdsOptions options;
  options.deadline_s = 0.05;
  GdsWorldOf<Io> world({{.fault = IoFault::kDelay, .delay_s = 0.2}}, options);
  world.fill(7);
  const TransferReport report = world.move(false);
  REQUIRE(!report.ok());
  CHECK(report.failures.back().status == Status::kFailed);
  CHECK(report.failures.back().reason.find("deadline") != std::string::npos);
}

TEST_CASE_TEMPLATE(
    "I/O that never ends takes the manager out of service, and never reaches the engine's blocks", Io,
    PosixFileIo, UringFileIo) {
  const int64_t files_before = open_files();
  {
    GdsOptions options;
    options.stuck_s = 2.0;
    GdsWorldOf<Io> world({{.fault = IoFault::kStall, .write = false}}, options);
    const auto content = world.stored();
    const auto before = world.pool;
    const TransferReport report = world.move(true);
    CHECK(report.stuck);
    CHECK(report.failures.size() == GdsWorld::kBlocks);
    CHECK(!world.manager->down_reason().empty());
    const TransferReport next = world.move(true);
    CHECK(next.failures.size() == GdsWorld::kBlocks);
    CHECK(next.failures[0].status == Status::kLaneDown);
    CHECK(world.device->allocated() == 1);  // the memory is kept, because I/O may still write to it
    world.manager->close();
    world.io->release();
    while (world.device->allocated() > 0) std::this_thread::yield();
    CHECK(world.pool == before);
  }
  while (open_files() > files_before) std::this_thread::yield();
  CHECK(open_files() == files_before);
}

TEST_CASE_TEMPLATE("a lent buffer is used from its first 4 KiB boundary on, and must hold a block", Io,
                   PosixFileIo, UringFileIo) {
  GdsWorldOf<Io> world;
  const auto content = world.stored();
  std::vector<unsigned char> memory(static_cast<size_t>(3 * GdsWorld::kImage));
  const auto lent =
      std::make_shared<StagingBuffer>(memory.data() + 1, static_cast<int64_t>(memory.size()) - 1);
  CHECK(lent->slots_of(GdsWorld::kImage) == 2);
  const auto pages = GdsWorld::pages();
  CHECK(world.manager->transfer(*world.map, pages, true, lent).ok());
  CHECK(world.pool == content);
  const auto small = std::make_shared<StagingBuffer>(memory.data(), GdsWorld::kImage - 1);
  CHECK_THROWS_AS(world.manager->transfer(*world.map, pages, true, small), CapacityError);
  CHECK_THROWS_AS(StagingBuffer(memory.data() + 1, 16), CapacityError);
}

TEST_CASE_TEMPLATE("a closed manager, unknown files and blocks named twice are refused; files are closed", Io,
                   PosixFileIo, UringFileIo) {
  const int64_t files_before = open_files();
  {
    GdsWorldOf<Io> world;
    auto pages = GdsWorld::pages(2);
    pages[1].file = 1;
    CHECK_THROWS_AS(world.manager->transfer(*world.map, pages, true), BlockRangeError);
    pages = {GdsWorld::page(1), GdsWorld::page(1)};
    CHECK_THROWS_AS(world.manager->transfer(*world.map, pages, true), BlockRangeError);
    pages[1].block = 2;  // two blocks may be read from the same place in a file, but not be written to it
    CHECK_THROWS_AS(world.manager->transfer(*world.map, pages, false), BlockRangeError);
    pages[1].block = 1;
    pages[1].file_offset += GdsWorld::kImage;
    CHECK_THROWS_AS(world.manager->transfer(*world.map, pages, true), BlockRangeError);
    CHECK(world.manager->transfer(*world.map, pages, false).ok());  // a block may be written to two places
    CHECK(world.manager->transfer(*world.map, {}, true).ok());
    world.manager->close();
    world.manager->close();
    CHECK_THROWS_AS(world.move(true), ClosedError);
  }
  CHECK(open_files() == files_before);
  CHECK_THROWS_AS(RawFiles(Paths{{"/proc/no/such/file"}}), ConfigError);
  CHECK_THROWS_AS(RawFiles(Paths{{"/dev/null"}}), ConfigError);
  const TemporaryFolder folder;
  CHECK_THROWS_AS(RawFiles(Paths{Names{folder.file("a"), folder.file("./a")}}), ConfigError);
  CHECK_THROWS_AS(RawFiles(Paths{Names{}}), ConfigError);
  CHECK(open_files() == files_before);
}

TEST_CASE_TEMPLATE(
    "transfers of several threads take turns at the staging, with lent buffers beside it, and all arrive", Io,
    PosixFileIo, UringFileIo) {
  GdsWorldOf<Io> world;
  const auto content = world.stored();
  std::vector<std::thread> threads;
  std::vector<char> ended_well(4, 0);
  std::vector<unsigned char> memory(static_cast<size_t>(3 * GdsWorld::kImage));
  for (int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const int32_t each = GdsWorld::kBlocks / 4;
      const auto all = GdsWorld::pages();
      const std::vector<StagedPage> mine(all.begin() + t * each, all.begin() + (t + 1) * each);
      const auto lent =
          t == 0 ? std::make_shared<StagingBuffer>(memory.data(), static_cast<int64_t>(memory.size()))
                 : nullptr;
      bool good = true;
      for (int round = 0; round < 5; ++round) {
        good = good && world.manager->transfer(*world.map, mine, true, lent).ok();
        good = good && world.manager->transfer(*world.map, mine, false, lent).ok();
      }
      ended_well[static_cast<size_t>(t)] = good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(ended_well == std::vector<char>(4, 1));
  CHECK(world.pool == content);
  CHECK(world.manager->totals().transfers == 41);
}
