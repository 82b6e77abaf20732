// cuFile as its callers see it, with a library that is ours: plain memory stands for GPU memory.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <set>

#include "base/error.h"
#include "gds/bounced_file_io.h"
#include "gds/cufile_io.h"
#include "gds/io_choice.h"
#include "gds_world.h"

using namespace flexkv;

namespace {

struct FakeCufile {
  std::mutex mutex;
  int32_t open = 0;
  int32_t open_error = 0;
  uint32_t status_flags = 1u << 4;  // NVMe
  int32_t refuse_files = 0;
  bool refuse_buffers = false;
  std::set<int> files;
  std::map<const void*, size_t> buffers;
  int64_t calls = 0;
  ssize_t next_answer = 0;  // what the next call returns instead of moving anything; 0: it moves
  int next_errno = 0;
};
FakeCufile fake;

ssize_t move(CufileHandle handle, void* base, size_t bytes, off_t file_offset, off_t buffer_offset,
             bool write) {
  const std::lock_guard lock(fake.mutex);
  fake.calls += 1;
  auto* memory = static_cast<char*>(base) + buffer_offset;
  CHECK(file_offset % 4096 == 0);
  CHECK(bytes % 4096 == 0);
  CHECK(reinterpret_cast<uintptr_t>(memory) % 4096 == 0);
  if (fake.next_answer != 0) {
    errno = fake.next_errno;
    const ssize_t answer = fake.next_answer;
    fake.next_answer = 0;
    return answer;
  }
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(handle));
  return write ? pwrite(fd, memory, bytes, file_offset) : pread(fd, memory, bytes, file_offset);
}

CufileTable fake_table() {
  CufileTable table;
  table.driver_open = [] {
    if (fake.open_error == 0) fake.open += 1;
    return CufileError{fake.open_error, 0};
  };
  table.driver_close = [] {
    fake.open -= 1;
    return CufileError{};
  };
  table.driver_properties = [](CufileProperties* properties) {
    properties->nvfs.major_version = 2;
    properties->nvfs.status_flags = fake.status_flags;
    return CufileError{};
  };
  table.handle_register = [](CufileHandle* handle, CufileDescription* description) {
    CHECK(description->type == 1);
    if (fake.refuse_files > 0) {
      fake.refuse_files -= 1;
      return CufileError{5008, 0};
    }
    fake.files.insert(description->file.fd);
    *handle = reinterpret_cast<CufileHandle>(static_cast<intptr_t>(description->file.fd));
    return CufileError{};
  };
  table.handle_deregister = [](CufileHandle handle) {
    CHECK(fake.files.erase(static_cast<int>(reinterpret_cast<intptr_t>(handle))) == 1);
  };
  table.buffer_register = [](const void* memory, size_t bytes, int) {
    if (fake.refuse_buffers) return CufileError{5011, 2};
    fake.buffers[memory] = bytes;
    return CufileError{};
  };
  table.buffer_deregister = [](const void* memory) {
    CHECK(fake.buffers.erase(memory) == 1);
    return CufileError{};
  };
  table.read = [](CufileHandle handle, void* base, size_t bytes, off_t file_offset, off_t buffer_offset) {
    return move(handle, base, bytes, file_offset, buffer_offset, false);
  };
  table.write = [](CufileHandle handle, const void* base, size_t bytes, off_t file_offset,
                   off_t buffer_offset) {
    return move(handle, const_cast<void*>(base), bytes, file_offset, buffer_offset, true);
  };
  return table;
}

void reset() {
  fake.open = fake.open_error = fake.refuse_files = 0;
  fake.status_flags = 1u << 4;
  fake.refuse_buffers = false;
  fake.files.clear();
  fake.buffers.clear();
  fake.calls = 0;
  fake.next_answer = 0;
}

// The manager of GdsWorld, over the fake.
struct CufileWorld {
  CufileWorld() { reset_world(); }
  void reset_world() {
    std::vector<std::vector<std::string>> paths;
    for (const char* disk : {"c0", "c1"}) paths.push_back({world.folder.file(disk)});
    files = std::make_shared<RawFiles>(paths);
    const auto device = host_transform_device();
    io = std::make_shared<CufileIo>(
        std::make_shared<Cufile>(fake_table()), files,
        std::make_shared<BouncedFileIo>(std::make_shared<PosixFileIo>(files), device));
    GdsOptions options;
    options.max_staging_blocks = 3;
    manager = std::make_unique<GDSManager>(files, options, device, io);
  }
  ~CufileWorld() {
    manager = nullptr;
    io = nullptr;
    CHECK(fake.open == 0);
    CHECK(fake.files.empty());
    CHECK(fake.buffers.empty());
  }
  TransferReport transfer(bool is_read) { return manager->transfer(*world.map, GdsWorld::pages(), is_read); }

  GdsWorld world;
  std::shared_ptr<RawFiles> files;
  std::shared_ptr<CufileIo> io;
  std::unique_ptr<GDSManager> manager;
};

}  // namespace

TEST_CASE("a closed manager keeps no file and no registration") {
  reset();
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
  CHECK(c.manager->devices() == 2);  // which files they were is still known
}

TEST_CASE("staged transfers make one aligned cuFile call a page, into memory registered once") {
  reset();
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
  CHECK(fake.calls == 2 * GdsWorld::kBlocks);
  CHECK(fake.buffers.size() == 1);
  CHECK(c.io->name().find("GPUDirect Storage (nvidia-fs 2.0)") != std::string::npos);
}

TEST_CASE("every negative answer and every short one fails its page, by its own words") {
  reset();
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
  // A file that ends early answers 0.
  REQUIRE(truncate(c.files->at(1, 0).path.c_str(), 2 * GdsWorld::kImage) == 0);
  const TransferReport report = c.transfer(true);
  CHECK(report.failures.size() == 4);
  CHECK(report.failures[0].reason.find("short") != std::string::npos);
}

TEST_CASE(
    "calls that are not aligned, and files that cuFile refuses, take the way around it and are counted") {
  reset();
  CufileWorld c;
  c.world.fill(3);
  const auto content = c.world.pool;
  auto pages = GdsWorld::pages();
  for (StagedPage& page : pages) page.file_offset += 512;
  const TransferReport written = c.manager->transfer(*c.world.map, pages, false);
  CHECK(written.ok());
  CHECK(written.bounced_calls == GdsWorld::kBlocks);
  CHECK(fake.calls == 0);
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
  reset();
  fake.status_flags = 0;
  CufileWorld c;
  CHECK(c.io->name().find("compatibility mode") != std::string::npos);
  c.world.fill(3);
  const TransferReport report = c.transfer(false);
  CHECK(report.ok());
  CHECK(report.bounced_calls == GdsWorld::kBlocks);
  CHECK(fake.calls == GdsWorld::kBlocks);
}

TEST_CASE("staging that cuFile does not register works all the same") {
  reset();
  fake.refuse_buffers = true;
  CufileWorld c;
  c.world.fill(3);
  CHECK(c.transfer(false).ok());
  CHECK(c.transfer(true).ok());
  CHECK(fake.buffers.empty());
}

TEST_CASE("a driver that does not open is an error that says why; without a GPU it is not even tried") {
  reset();
  fake.open_error = 5001;
  CHECK_THROWS_WITH_AS(Cufile{fake_table()}, doctest::Contains("5001"), ConfigError);
  fake.open_error = 5026;  // already open, by somebody else in this process
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
