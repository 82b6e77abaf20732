// The lane for H2D and D2H ops if the inference engine's pool is in ordinary host memory. Its threads, in
// this process, copy the pages.
#pragma once
#include <memory>
#include <thread>
#include <vector>

#include "transfer/lane.h"

namespace flexkv {

class HostLane : public Lane {
 public:
  // `threads`: the number of threads. They copy in both directions, and loads go before stores. Separate
  // threads for each direction would only take more CPU cores from the inference engine.
  HostLane(std::shared_ptr<PageMover> mover, int32_t threads) : mover_(std::move(mover)), threads_(threads) {}
  ~HostLane() override { abandon(); }

  const char* name() const override { return "host copy"; }
  KindSet kinds() const override { return kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H); }
  int32_t concurrency() const override { return threads_; }
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  void join() override;
  void abandon() override;

 private:
  std::shared_ptr<PageMover> mover_;
  int32_t threads_;
  std::vector<std::thread> running_;
};

}  // namespace flexkv
