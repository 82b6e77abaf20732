// An I/O queue that calls pread and pwrite in threads of its own. It is used if the kernel refuses io_uring.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/io_queue.h"

namespace flexkv {

// Unit: threads. The maximum number of threads of a queue. Eight threads are enough to keep a disk busy with
// large pages. Each thread waits in the kernel most of the time.
inline constexpr int32_t kMostIoThreads = 8;

class ThreadQueue : public IoQueue {
 public:
  explicit ThreadQueue(int32_t depth);
  // Waits for the I/Os in flight.
  ~ThreadQueue() override;

  const char* name() const override { return "threads"; }
  int32_t depth() const override { return depth_; }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoDone>& done) override;
  void take(std::vector<IoDone>& done) override;
  void wake() override;

 private:
  void run();

  const int32_t depth_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  std::deque<IoRequest> requests_;
  std::vector<IoDone> done_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace flexkv
