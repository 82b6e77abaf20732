// Tests transfers through cuFile with a fake libcufile, which uses host memory as GPU memory.
#include "base/error.h"
#include "fake_cufile.h"
#include "gds/io_choice.h"

using namespace flexkv;

TEST_CASE("a closed manager keeps no file and no registration") {
  reset_fake();
  CufileWorld c;
  c.files = nullptr;
  c.io = nullptr;
  c.world.fill(3);
  CHECK(c.transfer(false).ok());
  CHECK(!fake.files.empty());
  CHECK(!fake.buffers.empty());
  const int64_t files_before = open_files();
  c.manager->close();
  CHECK(fake.files.empty());
  CHECK(fake.buffers.empty());
  CHECK(open_files() < files_before);
  CHECK(c.manager->devices() == 2);  // the manager still has the list of its files
}

TEST_CASE("staged transfers make one aligned cuFile call a page, into memory registered once") {
  reset_fake();
  CufileWorld c;
  c.world.fill(3);
  const auto content = c.world.pool;
  const TransferReport written = c.transfer(false);
  CHECK(written.ok());
  CHECK(fake.buffers.size() == 1);
  std::memset(c.world.pool.data(), 0, c.world.pool.size());
  const TransferReport read = c.transfer(true);
  CHECK(read.ok());
  CHECK(read.bounced_calls == 0);
  CHECK(c.world.pool == content);
  CHECK(fake.calls == 2 * GdsWorld::kBlocks + 2);  // plus one read per file to learn the file's route
  CHECK(fake.buffers.size() == 1);
  CHECK(c.io->name().find("GPUDirect Storage (nvidia-fs 2.0)") != std::string::npos);
}

TEST_CASE("every negative answer and every short one fails its page, by its own words") {
  reset_fake();
  CufileWorld c;
  c.world.fill(3);
  REQUIRE(c.transfer(false).ok());
  const std::vector<std::tuple<ssize_t, int, const char*>> answers{{-1, EIO, "Input/output error"},
                                                                   {-1, 0, "without a reason"},
                                                                   {-5011, 0, "cuFile error 5011"},
                                                                   {1 << 30, 0, "says that it moved"}};
  for (const auto& [answer, error, words] : answers) {
    CAPTURE(answer);
    fake.next_answer = answer;
    fake.next_errno = error;
    const TransferReport report = c.transfer(true);
    REQUIRE(report.failures.size() == 1);
    CHECK(report.failures[0].reason.find(words) != std::string::npos);
    CHECK(c.transfer(true).ok());
  }
  // If a file ends early, the read returns 0.
  REQUIRE(truncate(c.files->at(1, 0).path.c_str(), 2 * GdsWorld::kImage) == 0);
  const TransferReport report = c.transfer(true);
  CHECK(report.failures.size() == 4);
  CHECK(report.failures[0].reason.find("short") != std::string::npos);
}

TEST_CASE(
    "calls that are not aligned, and files that cuFile refuses, take the way around it and are counted") {
  reset_fake();
  CufileWorld c;
  c.world.fill(3);
  const auto content = c.world.pool;
  auto pages = GdsWorld::pages();
  for (StagedPage& page : pages) page.file_offset += 512;
  const TransferReport written = c.manager->transfer(*c.world.map, pages, false);
  CHECK(written.ok());
  CHECK(written.bounced_calls == GdsWorld::kBlocks);
  CHECK(fake.calls == 2);  // only one read per file, from which the manager learns the file's route
  std::memset(c.world.pool.data(), 0, c.world.pool.size());
  CHECK(c.manager->transfer(*c.world.map, pages, true).ok());
  CHECK(c.world.pool == content);

  c.manager = nullptr;
  c.io = nullptr;
  fake.refuse_files = 1;
  c.reset_world();
  CHECK(c.io->refused(0, 0).find("5008") != std::string::npos);
  CHECK(c.io->name().find("5008") != std::string::npos);
  CHECK(c.transfer(false).bounced_calls == GdsWorld::kBlocks / 2);
  CHECK(c.transfer(true).ok());
}

TEST_CASE("compatibility mode is said, and never called GPUDirect or direct") {
  reset_fake();
  fake.status_flags = 0;
  CufileWorld c;
  CHECK(c.io->name().find("compatibility mode") != std::string::npos);
  c.world.fill(3);
  fake.all_posix = true;
  const TransferReport report = c.transfer(false);
  CHECK(report.ok());
  CHECK(report.bounced_calls == GdsWorld::kBlocks);
  CHECK(fake.calls == GdsWorld::kBlocks);  // none of the calls is a read to learn a route
}

TEST_CASE("staging that cuFile does not register works all the same") {
  reset_fake();
  fake.refuse_buffers = true;
  CufileWorld c;
  c.world.fill(3);
  CHECK(c.transfer(false).ok());
  CHECK(c.transfer(true).ok());
  CHECK(fake.buffers.empty());
}

TEST_CASE("a driver that does not open is an error that says why; without a GPU it is not even tried") {
  reset_fake();
  fake.open_error = 5001;
  CHECK_THROWS_WITH_AS(Cufile{fake_table()}, doctest::Contains("5001"), ConfigError);
  fake.open_error = 5026;  // other code in this process has opened the driver already
  {
    const Cufile opened(fake_table());
  }
  std::string why;
  CHECK(shared_cufile(0, &why) == nullptr);
  CHECK(why == "no GPU");
}

TEST_CASE("without a GPU the choice is plain memory and POSIX calls") {
  const auto device = choose_device(kHostDevice, 0);
  CHECK(device->number() == kHostDevice);
  const TemporaryFolder folder;
  const auto files = std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("a")}});
  CHECK(choose_io(files, device, IoBackend::kThreads)->name() == "posix");
  CHECK(choose_io(files, device)->name() == (uring_refusal().empty() ? "io_uring" : "posix"));
}
