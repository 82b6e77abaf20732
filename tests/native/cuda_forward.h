// Simulates a forward pass of the engine on the fake device. The forward pass runs until the test calls
// let_go().
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>

#include "cuda_world.h"

namespace flexkv {

// Blocks the engine's stream until let_go() is called, then does `work`.
class Forward {
 public:
  Forward(CudaWorld& world, std::function<void()> work) : stream_(world.stream) {
    fake_cuda::enqueue(stream_, [this, work = std::move(work)] {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return may_run_; });
      work();
    });
  }
  ~Forward() {
    let_go();
    fake_cuda::drain(stream_);
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    may_run_ = true;
    changed_.notify_all();
  }

 private:
  const uintptr_t stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool may_run_ = false;
};

}  // namespace flexkv
