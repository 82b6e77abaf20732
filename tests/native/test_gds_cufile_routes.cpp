// Tests which route flexkv reports for each file and each call. flexkv learns the route from cuFile's
// statistics. Without statistics it reports "not known".
#include <chrono>
#include <condition_variable>
#include <thread>

#include "fake_cufile.h"

using namespace flexkv;

namespace {

bool says(const CufileWorld& c, const std::string& words) {
  return c.io->name().find(words) != std::string::npos;
}

// Writes and reads every block, and checks that the read returns the written bytes. Returns the report of the
// read.
TransferReport write_and_read(CufileWorld& c) {
  c.world.fill(3);
  const auto content = c.world.pool;
  REQUIRE(c.transfer(false).ok());
  std::memset(c.world.pool.data(), 0, c.world.pool.size());
  TransferReport read = c.transfer(true);
  REQUIRE(read.ok());
  CHECK(c.world.pool == content);
  return read;
}

// A CufileWatch that reads counts which the test sets. `there`: whether the library provides counts.
struct Ops {
  CufileOps now;
  bool there = true;
  CufileWatch watch{[this] { return there ? std::optional(now) : std::nullopt; }};
  CufileWatch::Route file(IoRoute route) const { return std::make_shared<std::atomic<IoRoute>>(route); }
};

}  // namespace

TEST_CASE("cufile routes: a file in compatibility mode is told from one beside it that goes straight") {
  reset_fake();
  CufileWorld c;
  fill_files(c);
  fake.posix.insert(c.files->at(1, 0).direct_fd);
  const TransferReport read = write_and_read(c);
  // The route of a call is not known if it overlapped a call on the other file.
  CHECK(read.bounced_calls <= GdsWorld::kBlocks / 2);
  CHECK(read.bounced_calls + read.unknown_calls >= GdsWorld::kBlocks / 2);
  for (const int32_t disk : {0, 1}) {
    std::vector<StagedPage> pages = GdsWorld::pages();
    std::erase_if(pages, [&](const StagedPage& page) { return page.device != disk; });
    const TransferReport alone = c.manager->transfer(*c.world.map, pages, true);
    CHECK(alone.bounced_calls == disk * GdsWorld::kBlocks / 2);
    CHECK(alone.unknown_calls == 0);
  }
  CHECK(says(c, "1 of 2 files by GPUDirect Storage"));
  CHECK(says(c, c.files->at(1, 0).path + " by POSIX calls inside cuFile"));
  CHECK(!says(c, "GPUDirect Storage ("));
  CHECK(c.manager->direct_refusal().empty());  // empty, because one file with the direct route is enough
}

TEST_CASE("cufile routes: properties that promise GPUDirect are not believed against the statistics") {
  reset_fake();
  fake.all_posix = true;
  CufileWorld c;
  fill_files(c);
  const TransferReport read = write_and_read(c);
  CHECK(read.bounced_calls == GdsWorld::kBlocks);
  CHECK(says(c, "compatibility mode"));
  CHECK(!says(c, "GPUDirect Storage ("));
  CHECK(c.manager->direct_refusal().find("compatibility mode") != std::string::npos);
}

TEST_CASE("cufile routes: PCI P2PDMA without nvidia-fs is GPUDirect, and no compatibility mode") {
  for (const bool by_feature : {true, false}) {
    reset_fake();
    fake.nvfs_major = fake.status_flags = 0;
    fake.feature_flags = by_feature ? 1u << 4 : 0;
    fake.p2p_flags = by_feature ? 0 : 1;
    CufileWorld c;
    fill_files(c);
    const TransferReport read = write_and_read(c);
    CHECK(read.bounced_calls == 0);
    CHECK(read.unknown_calls == 0);
    CHECK(says(c, "cuFile, GPUDirect Storage (PCI P2PDMA)"));
    CHECK(c.manager->direct_refusal().empty());
  }
}

TEST_CASE("cufile routes: memory that cuFile did not register is bounced") {
  {
    reset_fake();
    fake.refuse_buffers = true;
    CufileWorld c;
    fill_files(c);
    CHECK(write_and_read(c).bounced_calls == GdsWorld::kBlocks);
    CHECK(says(c, "staging is bounced: cuFileBufRegister"));
    CHECK(c.manager->direct_refusal().find("cuFileBufRegister") != std::string::npos);
  }
  reset_fake();
  CufileWorld pool;  // represents an engine's pool, which is not registered
  fill_files(pool);
  alignas(4096) static char memory[4096];
  const IoCall call{false, 0, 0, 0, memory, 4096};
  CHECK(pool.io->route(call) == IoRoute::kBounced);
  CHECK(pool.io->transfer(call).route == IoRoute::kBounced);
  CHECK(pool.io->add_memory(memory, sizeof(memory)).empty());  // control: registered memory
  CHECK(pool.io->transfer(call).route == IoRoute::kDirect);
  CHECK(pool.io->route(call) == IoRoute::kDirect);
  pool.io->remove_memory(memory);
}

TEST_CASE(
    "cufile routes: without statistics, or with some of a layout that is not known, nothing is claimed") {
  for (const int32_t version : {1140, 1300, 0}) {
    CAPTURE(version);
    reset_fake();
    fake.version = version;
    CufileWorld c;
    fill_files(c);
    const TransferReport read = write_and_read(c);
    CHECK(read.bounced_calls == 0);
    CHECK(read.unknown_calls == GdsWorld::kBlocks);
    CHECK(says(c, "2 of 2 files not known: "));
    CHECK(says(c, version >= 1150 ? "layout" : "which came with 1.15"));
    CHECK(!says(c, "GPUDirect Storage ("));
    CHECK(c.manager->direct_refusal().empty());
  }
  reset_fake();
  fake.counts = false;
  CufileWorld c;
  fill_files(c);
  CHECK(write_and_read(c).unknown_calls == GdsWorld::kBlocks);
  CHECK(says(c, "none of its calls has been seen"));
}

TEST_CASE("cufile routes: both layouts of the statistics are read, and another one is not") {
  for (const auto& [version, offset] : {std::pair{1150, 1032}, {1180, 1032}, {1190, 1144}, {1200, 1144}}) {
    CHECK(cufile_statistics_offset(version) == static_cast<size_t>(offset));
    reset_fake();
    fake.version = version;
    CufileWorld c;
    fill_files(c);
    const TransferReport read = write_and_read(c);
    CHECK(read.bounced_calls + read.unknown_calls == 0);
  }
  CHECK(!cufile_statistics_offset(1140));
  CHECK(!cufile_statistics_offset(1210));
}

TEST_CASE("cufile routes: cuFile counts for us while it is open, and for others as before") {
  reset_fake();
  {
    const Cufile cufile(fake_table());
    CHECK(fake.level == 3);
    CHECK(fake.counting);
  }
  CHECK(fake.level == 0);
  CHECK(!fake.counting);
  fake.level = 3;  // set by another library
  fake.counting = true;
  {
    const Cufile cufile(fake_table());
  }
  CHECK(fake.level == 3);
  CHECK(fake.counting);
}

TEST_CASE("cufile routes: a call that bounces later is seen, and its file is direct no more") {
  reset_fake();
  CufileWorld c;
  fill_files(c);
  CHECK(write_and_read(c).bounced_calls == 0);
  fake.all_posix = true;
  static_cast<void>(c.transfer(true));
  CHECK(c.transfer(true).bounced_calls == GdsWorld::kBlocks);
  fake.all_posix = false;
  static_cast<void>(c.transfer(true));
  CHECK(c.transfer(true).bounced_calls == 0);
}

TEST_CASE("cufile routes: calls that overlap are told apart only where all of them went one way") {
  Ops ops;
  const auto one = ops.file(IoRoute::kUnknown), two = ops.file(IoRoute::kDirect);
  auto first = ops.watch.begin();
  auto second = ops.watch.begin();
  ops.now.direct += 1;
  CHECK(ops.watch.end(first, one, true) == IoRoute::kDirect);
  ops.now.direct += 3;  // cuFile may count a large call as several calls
  CHECK(ops.watch.end(second, two, true) == IoRoute::kDirect);
  CHECK(one->load() == IoRoute::kDirect);
  CHECK(ops.watch.calls().direct == 2);

  first = ops.watch.begin();
  second = ops.watch.begin();
  ops.now.direct += 1;
  CHECK(ops.watch.end(first, one, true) == IoRoute::kDirect);
  ops.now.bounced += 1;
  CHECK(ops.watch.end(second, two, true) == IoRoute::kUnknown);
  CHECK(two->load() == IoRoute::kDirect);  // the file keeps the last known route
  CHECK(ops.watch.calls().unknown == 1);

  first = ops.watch.begin();
  ops.now.bounced += 1;
  CHECK(ops.watch.end(first, two, true) == IoRoute::kBounced);
  CHECK(two->load() == IoRoute::kBounced);
  CHECK(one->load() == IoRoute::kDirect);

  first = ops.watch.begin();
  ops.now = {};  // the statistics were reset between the two readings
  CHECK(ops.watch.end(first, one, true) == IoRoute::kUnknown);
  ops.there = false;
  first = ops.watch.begin();
  CHECK(ops.watch.end(first, one, true) == IoRoute::kUnknown);
  CHECK(ops.watch.calls().unknown == 3);
}

TEST_CASE("cufile routes: beside a call that never ends the others are counted as they went") {
  Ops ops;
  const auto hung = ops.watch.begin();
  const auto file = ops.file(IoRoute::kDirect);
  for (int32_t i = 0; i < 1000; ++i) {
    const auto before = ops.watch.begin();
    ops.now.bounced += 1;
    CHECK(ops.watch.end(before, file, true) == IoRoute::kBounced);
  }
  CHECK(file->load() == IoRoute::kBounced);
  CHECK(ops.watch.calls().bounced == 1000);
  CHECK(ops.watch.end(hung, file, false) == IoRoute::kUnknown);
}

TEST_CASE("cufile routes: a call that moved nothing has no way, whatever was counted beside it") {
  Ops ops;
  const auto failed = ops.file(IoRoute::kUnknown), other = ops.file(IoRoute::kUnknown);
  const auto first = ops.watch.begin();
  const auto second = ops.watch.begin();
  ops.now.direct += 1;
  CHECK(ops.watch.end(first, failed, false) == IoRoute::kUnknown);
  CHECK(ops.watch.end(second, other, true) == IoRoute::kDirect);  // control: a call that moved bytes
  CHECK(failed->load() == IoRoute::kUnknown);
  CHECK(ops.watch.calls().unknown == 1);
}

TEST_CASE(
    "cufile routes: a call whose own counts say nothing is not known, though its file was seen direct") {
  reset_fake();
  CufileWorld c;
  fill_files(c);
  CHECK(write_and_read(c).unknown_calls == 0);
  fake.counts = false;
  const TransferReport read = c.transfer(true);
  CHECK(read.ok());
  CHECK(read.unknown_calls == GdsWorld::kBlocks);
}

TEST_CASE("cufile routes: the process's calls on memory that is not registered are bounced, as in totals") {
  reset_fake();
  CufileWorld c;
  fill_files(c);
  alignas(4096) static char memory[4096];
  const IoCall call{false, 0, 0, 0, memory, 4096};
  CHECK(c.io->transfer(call).route == IoRoute::kBounced);
  CHECK(fake.dma_ops == 1);  // cuFile counts the call as direct
  CHECK(says(c, "this process: 0 calls direct, 1 bounced, 0 not known"));
}

TEST_CASE("cufile routes: somebody else's counting goes on, at whatever level it was") {
  for (const int32_t level : {1, 2, 3}) {
    CAPTURE(level);
    reset_fake();
    fake.level = level;
    fake.counting = true;
    {
      const Cufile cufile(fake_table());
      CHECK(fake.level == 3);
    }
    CHECK(fake.level == level);
    CHECK(fake.counting);
  }
}

TEST_CASE("cufile users: the driver is opened once, and stays open after its last user") {
  static int32_t opens = 0, closes = 0;
  reset_fake();
  CufileTable table = fake_table();
  table.driver_open = [] {
    opens += 1;
    return CufileError{};
  };
  table.driver_close = [] {
    closes += 1;
    return CufileError{};
  };
  const auto load = [&] { return std::optional(table); };
  {
    CufileUsers users;
    CHECK(users.join([]() -> std::optional<CufileTable> { return std::nullopt; }) == nullptr);
    const Cufile* open = users.join(load).get();
    for (int cycle = 0; cycle < 30; ++cycle) {
      auto first = users.join(load);
      const auto same = users.join(load);
      CHECK(first == same);
      CHECK(first.get() == open);
    }
    CHECK(opens == 1);
    CHECK(closes == 0);
  }
  CHECK(closes == 1);  // control: the test detects a close. The CufileUsers that the process itself uses is
                       // never destroyed
}
