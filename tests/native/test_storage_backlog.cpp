// More pages than the disk lane queues at once, in front of a disk that is slow to submit: the dispatcher
// goes to sleep at a full queue again and again, and must be woken each time.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "io/io_queue.h"
#include "page_world.h"
#include "storage/disk_lane.h"
#include "transfer/engine.h"
#include "transfer/host_mover.h"

namespace flexkv {
namespace {

constexpr int32_t kPages = 64;
constexpr int32_t kPagesOfOp = 4;
constexpr int32_t kRounds = 12;
constexpr int64_t kBacklogPageBytes = int64_t{1} << 20;

// Gives the dispatcher time to push while the I/O thread is beginning pages.
class DawdlingQueue final : public IoQueue {
 public:
  explicit DawdlingQueue(std::unique_ptr<IoQueue> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  int32_t depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override { inner_->submit(request); }
  void wait(std::vector<IoDone>& done) override { inner_->wait(done); }
  void take(std::vector<IoDone>& done) override {
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (calls_++ % 4)));
    inner_->take(done);
  }
  void wake() override { inner_->wake(); }

 private:
  std::unique_ptr<IoQueue> inner_;
  int64_t calls_ = 0;
};

}  // namespace

TEST_CASE("a disk's dispatcher is woken whenever a full queue has room again") {
  const auto codec = page_codec(1, kBacklogPageBytes);
  const auto pool = HostPool::create({codec->image_bytes(), kPages, kMaxExtentBytes}, {});
  REQUIRE(pool->wait_ready(kPages, kWaitS));
  const std::string path = "slab-backlog";
  const SlabShape shape = make_slab(path, *codec, kPages, 1);
  std::vector<std::vector<std::shared_ptr<SlabFile>>> slabs;
  slabs.push_back({std::make_shared<SlabFile>(path, shape, -1)});
  std::vector<DiskGroup> groups;
  groups.push_back({codec, {}, pool});
  const WrapQueue wrap = [](std::unique_ptr<IoQueue> queue, int32_t) {
    return std::make_unique<DawdlingQueue>(std::move(queue));
  };
  const auto lane = std::make_shared<DiskLane>(std::move(groups), std::move(slabs),
                                               DiskOptions{IoBackend::kAuto, 4, 30.0}, wrap);
  TransferEngine engine(std::make_shared<HostMover>(), EngineOptions{},
                        std::vector<std::shared_ptr<Lane>>{lane});
  int64_t next_op = 1;
  for (int32_t round = 0; round < kRounds; ++round) {
    std::vector<int64_t> tickets;
    for (int32_t first = 0; first < kPages; first += kPagesOfOp) {
      OpSpec op;
      op.op_id = next_op++;
      op.kind = OpKind::kDiskWrite;
      op.priority = Priority::kStore;
      for (int32_t i = first; i < first + kPagesOfOp; ++i) {
        op.slots.push_back(i);
        op.places.push_back(i);
        add_tag(op, i);
      }
      tickets.push_back(submit_op(engine, std::move(op)));
    }
    for (const int64_t ticket : tickets) REQUIRE(engine.wait(ticket, kWaitS));
    for (const OpResult& result : engine.poll(tickets.size())) CHECK(result.status == Status::kOk);
  }
  CHECK(engine.close(kWaitS));
  std::remove(path.c_str());
}

}  // namespace flexkv
