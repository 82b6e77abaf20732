// A lane without threads. The test itself takes the lane's work items.
#pragma once
#include <atomic>
#include <memory>

#include "transfer/lane.h"

namespace flexkv {

class HandLane : public Lane {
 public:
  explicit HandLane(bool all_stages = false) : all_stages_(all_stages) {}
  const char* name() const override { return "by hand"; }
  KindSet kinds() const override { return kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H); }
  int32_t concurrency() const override { return 4; }
  bool takes_all_stages() const override { return all_stages_; }
  void start(std::shared_ptr<WorkSource>, int32_t) override {}
  void wake(OpKind) override { ++wakes; }
  void join() override {}
  void abandon() override {}

  std::atomic<int> wakes{0};

 private:
  const bool all_stages_;
};

}  // namespace flexkv
