#include "io/thread_queue.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/uring_queue.h"

namespace flexkv {
namespace {

int64_t carry_out(const IoRequest& request) {
  for (;;) {
    const auto bytes = static_cast<size_t>(request.bytes);
    const ssize_t moved = request.write ? pwrite(request.fd, request.buffer, bytes, request.offset)
                                        : pread(request.fd, request.buffer, bytes, request.offset);
    if (moved >= 0) return moved;
    if (errno != EINTR) return -errno;
  }
}

}  // namespace

ThreadQueue::ThreadQueue(int32_t depth) : depth_(depth) {
  for (int32_t i = 0; i < std::min(depth, kMostIoThreads); ++i) {
    threads_.emplace_back([this] { run(); });
    pthread_setname_np(threads_.back().native_handle(), "flexkv-pio");
  }
}

ThreadQueue::~ThreadQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !requests_.empty(); });
    if (requests_.empty()) return;
    const IoRequest request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const int64_t result = carry_out(request);
    lock.lock();
    done_.push_back({request.cookie, result});
    ended_.notify_one();
  }
}

void ThreadQueue::submit(const IoRequest& request) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }
  work_.notify_one();
}

void ThreadQueue::wait(std::vector<IoDone>& done) {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return woken_ || !done_.empty(); });
  woken_ = false;
  done.insert(done.end(), done_.begin(), done_.end());
  done_.clear();
}

void ThreadQueue::take(std::vector<IoDone>& done) {
  const std::lock_guard lock(mutex_);
  done.insert(done.end(), done_.begin(), done_.end());
  done_.clear();
}

void ThreadQueue::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  ended_.notify_one();
}

std::unique_ptr<IoQueue> make_io_queue(IoBackend backend, int32_t depth, IoMemories memories) {
  if (backend == IoBackend::kThreads || (backend == IoBackend::kAuto && !uring_refusal().empty())) {
    if (!memories.parts.empty()) memories.refused("it needs io_uring");
    return std::make_unique<ThreadQueue>(depth);
  }
  return std::make_unique<UringQueue>(depth, std::move(memories));
}

}  // namespace flexkv
