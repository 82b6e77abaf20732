// Tests that the CUDA lane reports a stage of an item only when the report is true for all pages of the item.
#include <doctest/doctest.h>

#include <mutex>

#include "cuda_world.h"

using namespace flexkv;

namespace {

struct Reports {
  std::mutex mutex;
  std::vector<int32_t> issued, passed;
};

// A work source that forwards all calls, and records the reported stages.
class Recorder : public WorkSource {
 public:
  Recorder(std::shared_ptr<WorkSource> source, std::shared_ptr<Reports> reports)
      : source_(std::move(source)), reports_(std::move(reports)) {}
  std::shared_ptr<WorkItem> take(int32_t lane) override { return source_->take(lane); }
  std::shared_ptr<WorkItem> try_take(int32_t lane, KindSet allowed) override {
    return source_->try_take(lane, allowed);
  }
  std::shared_ptr<WorkItem> try_take_expedited(int32_t lane) override {
    return source_->try_take_expedited(lane);
  }
  bool extend(const std::shared_ptr<WorkItem>& item) override { return source_->extend(item); }
  void issued(const std::shared_ptr<WorkItem>& item, int32_t stage,
              std::span<const std::shared_ptr<StreamEvent>> events) override {
    note(reports_->issued, stage);
    source_->issued(item, stage, events);
  }
  void passed(const std::shared_ptr<WorkItem>& item, int32_t stage) override {
    note(reports_->passed, stage);
    source_->passed(item, stage);
  }
  void finish(const std::shared_ptr<WorkItem>& item, const std::vector<MoveResult>& results) override {
    source_->finish(item, results);
  }
  void finish_pages(const std::shared_ptr<WorkItem>& item, const std::vector<size_t>& indices,
                    const std::vector<MoveResult>& results) override {
    source_->finish_pages(item, indices, results);
  }

 private:
  void note(std::vector<int32_t>& stages, int32_t stage) {
    const std::lock_guard lock(reports_->mutex);
    stages.push_back(stage);
  }

  const std::shared_ptr<WorkSource> source_;
  const std::shared_ptr<Reports> reports_;
};

class ReportingLane : public cuda::CudaLane {
 public:
  using CudaLane::CudaLane;
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override {
    CudaLane::start(std::make_shared<Recorder>(std::move(source), reports), lane);
  }
  const std::shared_ptr<Reports> reports = std::make_shared<Reports>();
};

}  // namespace

TEST_CASE("cuda reports: a stage that goes in two parts is issued and passed once, with its last part") {
  // One layer of two pages fills one part of a stage.
  const CudaShape shape{.layers = 2, .blocks = 4, .run_bytes = kSubBatchBytes / 2, .extent_slots = 4};
  CudaWorld world(shape, {}, {.batch = true, .kernel = false});
  for (const OpKind kind : {OpKind::kD2H, OpKind::kH2D}) {
    const auto lane = std::make_shared<ReportingLane>(world.device, fake_cuda::copy_kernels(),
                                                      cuda::CopySwitches{.batch = true, .kernel = false});
    CHECK(world.engine->close(CudaWorld::kLongS));
    world.make_engine(lane);
    CHECK(world.run(world.op(kind, {0, 1, 2, 3}, {0, 1, 2, 3}, true)).status == Status::kOk);
    const std::lock_guard lock(lane->reports->mutex);
    CHECK(lane->reports->issued == std::vector<int32_t>{0, 1});
    CHECK(lane->reports->passed == std::vector<int32_t>{0});
  }
}
