// Tests how a disk handles I/Os that fail, move too few bytes, damage bytes or hang: which pages fail, and
// for which reason.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "disk_lane_world.h"
#include "storage/layer_reads.h"

namespace flexkv {
namespace {

// A queue that forwards all calls, and calls the test's functions when requests are submitted, taken and
// completed.
class HookedQueue final : public IoQueue {
 public:
  struct Hooks {
    std::function<void(const IoRequest&)> submitted = [](const IoRequest&) {};
    std::function<void()> taking = [] {};
    std::function<void(size_t)> ended = [](size_t) {};
  };
  HookedQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<Hooks> hooks)
      : inner_(std::move(inner)), hooks_(std::move(hooks)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    hooks_->submitted(request);
    inner_->submit(request);
  }
  void wait(std::vector<IoDone>& done) override {
    const size_t before = done.size();
    inner_->wait(done);
    hooks_->ended(done.size() - before);
  }
  void take(std::vector<IoDone>& done) override {
    hooks_->taking();
    const size_t before = done.size();
    inner_->take(done);
    hooks_->ended(done.size() - before);
  }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<Hooks> hooks_;
};

WrapQueue hooked(std::shared_ptr<HookedQueue::Hooks> hooks, int32_t only_disk) {
  return [hooks = std::move(hooks), only_disk](std::unique_ptr<IoQueue> queue,
                                               int32_t disk) -> std::unique_ptr<IoQueue> {
    if (disk != only_disk) return queue;
    return std::make_unique<HookedQueue>(std::move(queue), hooks);
  };
}

// Writes all pages to disk. Tests read the pages back into different slots.
void store_all(DiskWorld& world) {
  for (int32_t i = 0; i < kWorldPlaces; ++i) world.fill(i, static_cast<uint8_t>(i + 1));
  world.submit(OpKind::kDiskWrite, 0, kWorldPlaces, 0);
  REQUIRE(world.results(1).front().status == Status::kOk);
}

OpResult read_pages(DiskWorld& world, int32_t first, int32_t count, bool layerwise) {
  world.submit(OpKind::kDiskRead, first, count, kWorldPlaces, layerwise);
  return std::move(world.results(1).front());
}

OpResult write_page(DiskWorld& world, int32_t place) {
  world.submit(OpKind::kDiskWrite, place, 1, 0);
  return std::move(world.results(1).front());
}

int64_t missed(const DiskWorld& world, int32_t disk, PageMiss miss) {
  return world.lane->counts(disk).misses[static_cast<size_t>(miss)];
}

// The offset, in the file of its disk, of byte `at` of the image in disk slot `place`.
int64_t in_slab(const DiskWorld& world, int32_t place, int64_t at) {
  return kSlabHeaderBytes + place / kWorldDisks * world.codec->image_bytes() + at;
}

constexpr int32_t kBadPlace = 6;  // on disk 0

}  // namespace

TEST_CASE("a page of a disk fails by name where its read fails, comes short or is damaged") {
  struct Way {
    IoFaultAction action;
    PageMiss miss;
    FailureCause cause;
  };
  // Offset in the image of a byte of the last run. Only the last range of layers has this byte.
  const int64_t last = 2 * kWorldRun + 2000;
  for (const bool layerwise : {false, true}) {
    for (const auto& [action, miss, cause] :
         {Way{IoFaultAction::kFail, PageMiss::kIo, FailureCause::kSource},
          Way{IoFaultAction::kShort, PageMiss::kShort, FailureCause::kSource},
          Way{IoFaultAction::kCorrupt, PageMiss::kData, FailureCause::kContent}}) {
      CAPTURE(layerwise);
      CAPTURE(static_cast<int>(action));
      DiskWorld world(IoBackend::kThreads);
      store_all(world);
      IoFaultRule rule;
      rule.action = action;
      rule.write = false;
      rule.disk = 0;
      rule.offset = in_slab(world, kBadPlace, last);
      // A short read ends at the last 4 KiB boundary before the byte at `last`. Layerwise and other reads
      // both begin at the start of the image.
      rule.bytes = action == IoFaultAction::kShort ? last / 4096 * 4096 : last;
      rule.times = 1;
      world.faults->add(rule);
      const OpResult result = read_pages(world, 0, kWorldPlaces, layerwise);
      CHECK(result.failed == std::vector<int32_t>{kBadPlace});
      CHECK(result.causes == std::vector<FailureCause>{cause});
      CHECK(missed(world, 0, miss) == 1);
      CHECK(read_pages(world, kBadPlace, 1, layerwise).status == Status::kOk);
      for (int32_t i = 0; i < kWorldPlaces; ++i) {
        CHECK(world.holds(kWorldPlaces + i, static_cast<uint8_t>(i + 1)));
      }
    }
  }
}

TEST_CASE("a short read of which only bytes without meaning are missing is no page") {
  DiskWorld world(IoBackend::kThreads);
  store_all(world);
  IoFaultRule rule;
  rule.action = IoFaultAction::kShort;
  rule.write = false;
  rule.disk = 0;
  rule.offset = in_slab(world, kBadPlace, 0);
  rule.bytes = world.codec->image_bytes() - 512;
  world.faults->add(rule);
  CHECK(read_pages(world, kBadPlace, 1, false).causes == std::vector<FailureCause>{FailureCause::kSource});
  CHECK(missed(world, 0, PageMiss::kShort) == 1);
}

TEST_CASE("a page read by layers is checked for what it is, like a whole one") {
  for (const bool layerwise : {false, true}) {
    DiskWorld world(IoBackend::kThreads);
    store_all(world);
    OpSpec op;
    op.op_id = world.next_op++;
    op.kind = OpKind::kDiskRead;
    op.layerwise = layerwise;
    op.slots = {kWorldPlaces, kWorldPlaces + 1};
    op.places = {2, 4};
    add_tag(op, 2);
    add_tag(op, 5);  // disk slot 4 has a different page
    submit_op(*world.engine, std::move(op));
    const OpResult result = std::move(world.results(1).front());
    CHECK(result.failed == std::vector<int32_t>{1});
    CHECK(missed(world, 0, PageMiss::kKey) == 1);
  }
}

TEST_CASE("a later range of layers leaves the layers that are in place alone") {
  DiskWorld world(IoBackend::kThreads);
  store_all(world);
  // The read of the second range begins with a sector that also has bytes of the first range. This test
  // damages only such bytes, so the read must succeed.
  REQUIRE(layer_stages(*world.codec) == std::vector<int32_t>{0, 1});
  IoFaultRule rule;
  rule.action = IoFaultAction::kCorrupt;
  rule.write = false;
  rule.disk = 0;
  rule.offset = in_slab(world, kBadPlace, kWorldRun + 2000);
  rule.bytes = 100;
  world.faults->add(rule);
  CHECK(read_pages(world, kBadPlace, 1, true).status == Status::kOk);
  CHECK(world.faults->acted() == 1);
  CHECK(world.holds(kWorldPlaces + kBadPlace, kBadPlace + 1));
}

TEST_CASE("a disk taken out serves and takes nothing more, and keeps its first reason") {
  DiskWorld world(IoBackend::kThreads);
  store_all(world);
  world.lane->take_out(0, "a first reason");
  world.lane->take_out(0, "a second reason");
  CHECK(world.lane->states()[0].reason == "a first reason");
  const OpResult read = read_pages(world, 0, 2, false);
  CHECK(read.failed == std::vector<int32_t>{0});
  CHECK(read.causes == std::vector<FailureCause>{FailureCause::kTransport});
  CHECK(read.reason.find("a first reason") != std::string::npos);
  CHECK(!world.holds(kWorldPlaces, 1));
  CHECK(write_page(world, 0).status != Status::kOk);
  CHECK(missed(world, 0, PageMiss::kDiskLost) == 2);
  CHECK_THROWS_AS(world.lane->take_out(kWorldDisks, "no such disk"), BlockRangeError);
}

TEST_CASE("errors take a disk out only if no I/O of their kind succeeds between them") {
  constexpr int32_t kWriteErrors = 3;  // equals kWriteErrorsBeforeOut in disk_job.cpp
  constexpr int32_t kReadErrors = 8;
  for (const bool write : {true, false}) {
    DiskWorld world(IoBackend::kThreads);
    store_all(world);
    const auto attempt = [&] {
      return write ? write_page(world, 0).status : read_pages(world, 0, 1, false).status;
    };
    const int32_t most = write ? kWriteErrors : kReadErrors;
    IoFaultRule rule;
    rule.write = write;
    rule.disk = 0;
    rule.times = most - 1;
    for (int32_t round = 0; round < 2; ++round) {
      world.faults->add(rule);
      for (int32_t i = 0; i + 1 < most; ++i) CHECK(attempt() == Status::kFailed);
      CHECK(attempt() == Status::kOk);
      CHECK(!world.lane->states()[0].lost);
    }
    rule.times = most;
    world.faults->add(rule);
    for (int32_t i = 0; i < most; ++i) CHECK(attempt() != Status::kOk);
    const auto deadline = deadline_in(kWaitS);
    while (!world.lane->states()[0].lost) {
      REQUIRE(Clock::now() < deadline);
      usleep(1000);
    }
  }
}

TEST_CASE("a disk without space stays, and is no longer full once a write finds space") {
  DiskWorld world(IoBackend::kThreads);
  store_all(world);
  IoFaultRule rule;
  rule.write = true;
  rule.disk = 0;
  rule.error = ENOSPC;
  rule.times = 1;
  // A disk without space does not stop later writes, so each write is attempted.
  for (int32_t i = 0; i < 4; ++i) {
    world.faults->add(rule);
    CHECK(write_page(world, 0).status == Status::kFailed);
    CHECK(world.lane->full_reasons()[0] != "");
  }
  CHECK(!world.lane->states()[0].lost);
  CHECK(world.lane->full_reasons()[1] == "");
  CHECK(write_page(world, 0).status == Status::kOk);
  CHECK(world.lane->full_reasons()[0] == "");
}

TEST_CASE("a disk whose queue breaks ends the pages that have arrived and those that come later") {
  const auto hooks = std::make_shared<HookedQueue::Hooks>();
  std::atomic<bool> broken{false};
  hooks->taking = [&] {
    if (broken) throw DiskError("the queue broke");
  };
  DiskWorld world(IoBackend::kThreads, {}, 30.0, hooked(hooks, 0));
  store_all(world);
  broken = true;
  // The queue's wait() returns the page. Then its take() throws, before the page is checked.
  CHECK(read_pages(world, 0, 1, false).status == Status::kOk);
  CHECK(world.holds(kWorldPlaces, 1));
  CHECK(world.lane->states()[0].lost);
  CHECK(world.lane->states()[0].reason == "the queue broke");
  const OpResult read = read_pages(world, 0, 2, false);
  CHECK(read.failed == std::vector<int32_t>{0});
}

TEST_CASE("no more I/Os are in flight than a queue may have, even of pages read by layers") {
  const auto hooks = std::make_shared<HookedQueue::Hooks>();
  std::atomic<int64_t> in_flight{0};
  std::atomic<int64_t> most{0};
  hooks->submitted = [&](const IoRequest&) { most = std::max(most.load(), ++in_flight); };
  hooks->ended = [&](size_t count) { in_flight -= static_cast<int64_t>(count); };
  DiskWorld world(IoBackend::kThreads, {}, 30.0, hooked(hooks, 0));
  store_all(world);
  CHECK(read_pages(world, 0, kWorldPlaces, true).status == Status::kOk);
  CHECK(most <= 8);  // depth of DiskWorld's queues
  CHECK(in_flight == 0);
}

}  // namespace flexkv
