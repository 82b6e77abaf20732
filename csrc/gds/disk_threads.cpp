#include "gds/disk_threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"

namespace flexkv {

struct DiskThreads::Disk {
  std::condition_variable ready;
  std::deque<Task> queue;
  std::vector<std::thread> threads;
  int32_t idle = 0;
};

struct DiskThreads::Shared {
  mutable std::mutex mutex;
  std::deque<Disk> disks;
  std::function<std::string()> on_start;
  size_t threads_per_disk = 1;
  bool closing = false;

  static void run(const std::shared_ptr<Shared>& shared, Disk& disk) {
    const std::string not_started = shared->on_start ? shared->on_start() : std::string();
    std::unique_lock lock(shared->mutex);
    while (true) {
      disk.idle += 1;
      disk.ready.wait(lock, [&] { return shared->closing || !disk.queue.empty(); });
      disk.idle -= 1;
      if (disk.queue.empty()) return;
      Task task = std::move(disk.queue.front());
      disk.queue.pop_front();
      lock.unlock();
      task(not_started);
      task = nullptr;  // frees what the task owns before the wait for the next task
      lock.lock();
    }
  }
};

DiskThreads::DiskThreads(int32_t disks, int32_t threads_per_disk, std::function<std::string()> on_start)
    : shared_(std::make_shared<Shared>()) {
  if (threads_per_disk < 1 || threads_per_disk > kMaxThreadsPerDisk) {
    throw ConfigError("threads per disk is " + std::to_string(threads_per_disk) + ": allowed is [1, " +
                      std::to_string(kMaxThreadsPerDisk) + "]");
  }
  shared_->disks.resize(static_cast<size_t>(disks));
  shared_->on_start = std::move(on_start);
  shared_->threads_per_disk = static_cast<size_t>(threads_per_disk);
}

DiskThreads::~DiskThreads() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
  }
  for (Disk& disk : shared_->disks) {
    disk.ready.notify_all();
    for (std::thread& thread : disk.threads) thread.join();
  }
}

void DiskThreads::submit(int32_t disk, Task task) {
  Disk& target = shared_->disks[static_cast<size_t>(disk)];
  const std::lock_guard lock(shared_->mutex);
  target.queue.push_back(std::move(task));
  if (target.idle < static_cast<int32_t>(target.queue.size()) &&
      target.threads.size() < shared_->threads_per_disk) {
    try {
      target.threads.emplace_back([shared = shared_, &target] { Shared::run(shared, target); });
      pthread_setname_np(target.threads.back().native_handle(), "flexkv-gds");
    } catch (const std::system_error&) {
      if (target.threads.empty()) {
        target.queue.pop_back();
        throw;
      }
      // No new thread could be started, so a thread that is already running will take the task.
    }
  }
  target.ready.notify_one();
}

void DiskThreads::abandon() {
  const std::lock_guard lock(shared_->mutex);
  shared_->closing = true;
  for (Disk& disk : shared_->disks) {
    for (std::thread& thread : disk.threads) thread.detach();
    disk.threads.clear();
    disk.ready.notify_all();
  }
}

int32_t DiskThreads::started() const {
  const std::lock_guard lock(shared_->mutex);
  size_t count = 0;
  for (const Disk& disk : shared_->disks) count += disk.threads.size();
  return static_cast<int32_t>(count);
}

}  // namespace flexkv
