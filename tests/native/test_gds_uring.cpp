// Tests transfers through io_uring rings with injected faults: which results the ring reports, and how the
// transfer reacts.
#include <doctest/doctest.h>

#include "base/error.h"
#include "gds/uring_file_io.h"
#include "gds_world.h"
#include "io/uring_queue.h"
#include "testing/faulty_queue.h"

using namespace flexkv;

namespace {

// Raw I/O on one file of `kBytes` random bytes, through rings with the faults of `rules`.
struct RingWorld {
  static constexpr int64_t kBytes = int64_t{100} * 4096;

  explicit RingWorld(std::vector<IoFaultRule> rules = {})
      : faults(std::make_shared<IoFaults>(std::move(rules))), content(static_cast<size_t>(kBytes)) {
    std::mt19937 random(5);
    for (auto& byte : content) byte = static_cast<unsigned char>(random());
    std::ofstream(folder.file("a"), std::ios::binary)
        .write(reinterpret_cast<const char*>(content.data()), kBytes);
    files = std::make_shared<RawFiles>(std::vector<std::vector<std::string>>{{folder.file("a")}});
    io = std::make_unique<UringFileIo>(files, [this](std::unique_ptr<IoQueue> queue, int32_t disk) {
      return std::make_unique<FaultyQueue>(std::move(queue), faults, disk);
    });
  }

  // Reads the file into `memory` with `pieces` calls of equal length.
  std::vector<IoOutcome> read(std::vector<unsigned char>& memory, int64_t pieces) {
    // The memory is not aligned, so the reads use the page cache. After a fault has shortened a read, its
    // rest has an odd length, which direct I/O does not allow.
    std::vector<unsigned char> room(static_cast<size_t>(kBytes) + 8192);
    unsigned char* const start = room.data() + (4096 - reinterpret_cast<uintptr_t>(room.data()) % 4096) + 8;
    const int64_t each = kBytes / pieces;
    std::vector<IoCall> calls;
    for (int64_t i = 0; i < pieces; ++i) calls.push_back({false, 0, 0, i * each, start + i * each, each});
    std::vector<IoOutcome> outcomes(calls.size());
    io->transfer_all(calls, outcomes);
    memory.assign(start, start + kBytes);
    return outcomes;
  }

  TemporaryFolder folder;
  std::shared_ptr<IoFaults> faults;
  std::vector<unsigned char> content;
  std::shared_ptr<const RawFiles> files;
  std::unique_ptr<UringFileIo> io;
};

}  // namespace

TEST_CASE("a ring moves more calls than it has places, and finishes what came short") {
  if (!uring_refusal().empty()) return;
  std::vector<unsigned char> memory;
  RingWorld world({{.action = IoFaultAction::kShort, .offset = 4096 * 7, .bytes = 1000, .times = 1},
                   {.action = IoFaultAction::kFail, .offset = 4096 * 50, .error = EINTR, .times = 1},
                   {.action = IoFaultAction::kFail, .offset = 4096 * 60, .error = EAGAIN, .times = 1}});
  const auto outcomes = world.read(memory, 100);
  for (const IoOutcome& outcome : outcomes) {
    CHECK(outcome.bytes == 4096);
    CHECK_MESSAGE(outcome.error.empty(), outcome.error);
  }
  CHECK(memory == world.content);
  CHECK(world.faults->acted() == 3);
  // I/O of odd lengths and addresses uses the page cache.
  IoCall call{false, 0, 0, 4097, memory.data() + 1, 1001};
  CHECK(world.io->route(call) == IoRoute::kBounced);
  CHECK(world.io->transfer(call).bytes == 1001);
  CHECK(std::memcmp(memory.data() + 1, world.content.data() + 4097, 1001) == 0);
  call.offset = RingWorld::kBytes - 10;
  const IoOutcome end = world.io->transfer(call);
  CHECK(end.bytes == 10);
  CHECK(end.error.empty());
  call.bytes = 0;
  CHECK(world.io->transfer(call).bytes == 0);
}

TEST_CASE("a manager makes the I/O that its options ask for") {
  const TemporaryFolder folder;
  const std::vector<std::vector<std::string>> paths{{folder.file("a")}};
  const auto described = [&](IoBackend backend) {
    GdsOptions options;
    options.io = backend;
    return GDSManager(paths, options, host_transform_device()).describe();
  };
  CHECK(described(IoBackend::kThreads) == "posix to host");
  if (uring_refusal().empty()) {
    CHECK(described(IoBackend::kUring) == "io_uring to host");
    CHECK(described(IoBackend::kAuto) == "io_uring to host");
  } else {
    CHECK_THROWS_AS(described(IoBackend::kUring), ConfigError);
    CHECK(described(IoBackend::kAuto) == "posix to host");
  }
}

TEST_CASE("a manager that is given its I/O refuses options that ask for another") {
  const TemporaryFolder folder;
  const auto files =
      std::make_shared<const RawFiles>(std::vector<std::vector<std::string>>{{folder.file("a")}});
  for (const IoBackend backend : {IoBackend::kUring, IoBackend::kThreads}) {
    GdsOptions options;
    options.io = backend;
    CHECK_THROWS_WITH_AS(
        GDSManager(files, options, host_transform_device(), std::make_shared<PosixFileIo>(files)),
        doctest::Contains("where the caller makes the I/O"), ConfigError);
  }
}

TEST_CASE("calls that break off leave nothing in flight, and the next ones hear of none of them") {
  if (!uring_refusal().empty()) return;
  // A queue that accepts `left` requests and throws std::bad_alloc at the next one.
  class BreakingQueue : public IoQueue {
   public:
    BreakingQueue(std::unique_ptr<IoQueue> inner, int& left, int& in_flight)
        : inner_(std::move(inner)), left_(left), in_flight_(in_flight) {}
    const char* name() const override { return inner_->name(); }
    int32_t depth() const override { return inner_->depth(); }
    void submit(const IoRequest& request) override {
      if (left_-- == 0) throw std::bad_alloc();
      inner_->submit(request);
      ++in_flight_;
    }
    void take(std::vector<IoDone>& done) override { inner_->take(done); }
    void wait(std::vector<IoDone>& done) override {
      const size_t before = done.size();
      inner_->wait(done);
      in_flight_ -= static_cast<int>(done.size() - before);
    }
    void wake() override { inner_->wake(); }

   private:
    std::unique_ptr<IoQueue> inner_;
    int& left_;
    int& in_flight_;
  };
  int left = 20;
  int in_flight = 0;
  std::vector<unsigned char> memory;
  RingWorld world;
  world.io = std::make_unique<UringFileIo>(world.files, [&](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<BreakingQueue>(std::move(queue), left, in_flight);
  });
  CHECK_THROWS_AS(world.read(memory, 100), std::bad_alloc);
  CHECK(in_flight == 0);
  for (const IoOutcome& outcome : world.read(memory, 100)) CHECK(outcome.bytes == 4096);
  CHECK(memory == world.content);
}

TEST_CASE("a ring's error is the call's, and ends the calls that were not made") {
  if (!uring_refusal().empty()) return;
  std::vector<unsigned char> memory;
  RingWorld world({{.action = IoFaultAction::kFail, .offset = 0, .error = ENOSPC, .times = 1}});
  const auto outcomes = world.read(memory, 100);
  CHECK(outcomes[0].bytes == 0);
  CHECK(outcomes[0].error == "No space left on device");
  CHECK_FALSE(outcomes[0].of_memory);
  CHECK(outcomes[99].bytes == 0);  // the ring was full, so this call was not made
  world.faults->release();
  CHECK(world.read(memory, 100)[99].bytes == 4096);
  CHECK(memory == world.content);
}

TEST_CASE("damage below a ring is found by the digests, and EIO there fails its page alone") {
  if (!uring_refusal().empty()) return;
  for (const IoFaultAction action : {IoFaultAction::kCorrupt, IoFaultAction::kFail}) {
    GdsWorld plain;
    const auto faults = std::make_shared<IoFaults>(std::vector<IoFaultRule>{});
    std::vector<std::vector<std::string>> paths;
    for (int32_t disk = 0; disk < GdsWorld::kDisks; ++disk) {
      paths.push_back({plain.folder.file(std::to_string(disk))});
    }
    const auto files = std::make_shared<RawFiles>(paths);
    auto io = std::make_shared<UringFileIo>(files, [&](std::unique_ptr<IoQueue> queue, int32_t disk) {
      return std::make_unique<FaultyQueue>(std::move(queue), faults, disk);
    });
    GDSManager manager(files, {}, host_transform_device(), io);
    const auto content = plain.stored();
    const auto pages = GdsWorld::pages();
    CHECK(manager.transfer(*plain.map, pages, true).ok());
    CHECK(plain.pool == content);
    faults->add({.action = action, .write = false, .bytes = 3500, .times = 1});
    const TransferReport report = manager.transfer(*plain.map, pages, true);
    REQUIRE(report.failures.size() == 1);
    CHECK(report.failures[0].cause ==
          (action == IoFaultAction::kFail ? StagedFailure::kIo : StagedFailure::kDigest));
    CHECK(manager.transfer(*plain.map, pages, true).ok());
    CHECK(plain.pool == content);
    CHECK(manager.describe().find("io_uring") == 0);
  }
}
