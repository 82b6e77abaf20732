// Helpers for tests of threads: the number of threads with a name, a class that prevents the start of
// threads, and a barrier.
#pragma once
#include <pthread.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "transfer/deadline.h"

namespace flexkv {

inline int threads_named(const std::string& name) {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");  // a thread that has ended has no name
    std::string comm;
    count += std::getline(file, comm) && comm == name ? 1 : 0;
  }
  return count;
}

// Waits until `condition()` is true, at most `seconds`. Returns whether it is true.
template <typename Condition>
bool comes_true(Condition condition, double seconds = 60) {
  const auto deadline = deadline_in(seconds);
  while (!condition() && seconds_until(deadline) > 0) std::this_thread::yield();
  return condition();
}

// Waits until exactly `count` threads have this name, at most `seconds`. A wait is needed because a joined
// thread may still be listed for a moment.
inline bool come_to(int count, const std::string& name, double seconds = 60) {
  const auto deadline = deadline_in(seconds);
  while (threads_named(name) != count && seconds_until(deadline) > 0) std::this_thread::yield();
  return threads_named(name) == count;
}

// Until the destructor runs, this process can start no thread with default attributes, because the default
// stack is larger than the process's address space.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 47);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

  static bool refuses() {
    try {
      std::thread([] {}).join();
    } catch (const std::system_error&) {
      return true;
    }
    return false;
  }

 private:
  pthread_attr_t before_;
};

// A barrier that holds each thread until `threads` threads have come, so that timing does not decide which
// threads take part.
class Meeting {
 public:
  explicit Meeting(size_t threads, double seconds = 60)
      : threads_(threads), deadline_(deadline_in(seconds)) {}
  void come() {
    std::unique_lock lock(mutex_);
    came_.insert(std::this_thread::get_id());
    changed_.notify_all();
    changed_.wait_until(lock, deadline_, [&] { return came_.size() >= threads_; });
  }
  size_t came() const {
    const std::lock_guard lock(mutex_);
    return came_.size();
  }
  bool was_there(std::thread::id id) const {
    const std::lock_guard lock(mutex_);
    return came_.count(id) != 0;
  }

 private:
  const size_t threads_;
  const Clock::time_point deadline_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::thread::id> came_;
};

}  // namespace flexkv
