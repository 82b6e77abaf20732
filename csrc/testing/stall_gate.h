// Blocks calls on behalf of injected faults, as a device that hangs would, until a test releases them.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "transfer/deadline.h"

namespace flexkv {

class StallGate {
 public:
  // Blocks until release(). This is the only wait without a deadline.
  void hold() {
    std::unique_lock lock(mutex_);
    ++held_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
    --held_;
  }
  // Releases all held calls, and lets all later ones pass.
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  bool released() const {
    const std::lock_guard lock(mutex_);
    return released_;
  }
  // Calls that are held now.
  int64_t held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  // Waits until at least `count` calls are held at once; false if the deadline passes first.
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
