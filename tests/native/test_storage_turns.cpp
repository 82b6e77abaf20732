// Tests the order of I/Os on one disk: reads go before writes, but a write goes next after it has waited for
// many reads.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "one_disk.h"

namespace flexkv {
namespace {

constexpr int32_t kReads = 40;
constexpr int32_t kWrites = 4;
constexpr int32_t kTurnPlaces = 64;
// How many reads may go before a waiting write; disk_io.cpp has the same number.
constexpr size_t kReadsBeforeWrite = 16;

// A queue that records whether each I/O reads or writes, in the order in which they are submitted.
class NotingQueue final : public IoQueue {
 public:
  NotingQueue(std::unique_ptr<IoQueue> inner, std::shared_ptr<std::string> order)
      : inner_(std::move(inner)), order_(std::move(order)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    *order_ += request.write ? 'w' : 'r';
    inner_->submit(request);
  }
  void wait(std::vector<IoDone>& done) override { inner_->wait(done); }
  void take(std::vector<IoDone>& done) override { inner_->take(done); }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::shared_ptr<std::string> order_;  // 'r' or 'w' per I/O; while the disk runs, only its thread uses it
};

// Returns what is wrong with the order of the I/Os; an empty string if the order is right. Precondition: all
// I/Os were queued before the disk started.
std::string wrong_turn(const std::string& order) {
  size_t reads_left = kReads;
  size_t writes_left = kWrites;
  size_t in_row = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] == 'w') {
      if (reads_left > 0 && in_row < kReadsBeforeWrite) return "a write went before reads that waited";
      --writes_left;
      in_row = 0;
    } else {
      if (writes_left > 0 && in_row == kReadsBeforeWrite) return "a write was put off for too many reads";
      --reads_left;
      ++in_row;
    }
  }
  return reads_left + writes_left == 0 ? "" : "an I/O is missing";
}

}  // namespace

TEST_CASE("reads go before writes, and a write that waited for many of them gets its turn") {
  const auto order = std::make_shared<std::string>();
  const WrapQueue wrap = [order](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<NotingQueue>(std::move(queue), order);
  };
  // The queue has one I/O in flight at a time, so that the order of submission shows which I/O the disk chose
  // each time.
  OneDisk world(kTurnPlaces, DiskOptions{IoBackend::kAuto, 1, 0}, wrap);
  // All I/Os wait when the disk starts. The writes were queued first.
  const std::vector<int64_t> tickets{world.push(OpKind::kDiskWrite, 0, kWrites),
                                     world.push(OpKind::kDiskRead, kWrites, kReads)};
  REQUIRE(world.disk->queued() == kWrites + kReads);
  world.start();
  for (const int64_t ticket : tickets) CHECK(world.scheduler->wait(ticket, kWaitS));
  world.stop();
  CHECK(wrong_turn(*order) == "");
}

TEST_CASE("orders that starve one or the other are told") {
  const std::string reads(kReads, 'r');
  const std::string writes(kWrites, 'w');
  CHECK(wrong_turn(reads + writes) == "a write was put off for too many reads");
  CHECK(wrong_turn(writes + reads) == "a write went before reads that waited");
  CHECK(wrong_turn(reads.substr(1) + writes) != "");
}

}  // namespace flexkv
