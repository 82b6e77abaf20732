// A mutex that threads acquire in the order in which they ask for it. If a thread releases and reacquires the
// mutex between two parts of its work, threads that are already waiting run before the second part.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace flexkv {

// Has lock() and unlock(), so it can be used with std::lock_guard.
class FairMutex {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    const uint64_t turn = next_++;
    turned_.wait(guard, [&] { return turn == turn_; });
  }

  void unlock() {
    {
      const std::lock_guard guard(mutex_);
      ++turn_;
    }
    turned_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turned_;
  uint64_t next_ = 0;
  uint64_t turn_ = 0;
};

}  // namespace flexkv
