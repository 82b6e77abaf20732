// A gate that blocks calls until a test releases them. Injected faults use it to simulate a device that
// hangs.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "transfer/deadline.h"

namespace flexkv {

class StallGate {
 public:
  // Blocks until another thread calls release(), without a deadline.
  void hold() {
    std::unique_lock lock(mutex_);
    ++held_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
    --held_;
  }
  // Lets all held calls continue. Later calls do not block any more.
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  bool released() const {
    const std::lock_guard lock(mutex_);
    return released_;
  }
  // The number of calls that are held at present.
  int64_t held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  // Waits until at least `count` calls are held at the same time. Returns false if the deadline passes first.
  bool wait_held(int64_t count, double deadline_s) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline_in(deadline_s), [&] { return held_ >= count; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t held_ = 0;
  bool released_ = false;
};

}  // namespace flexkv
