// Runs each disk's I/O on a few threads of its own, which are started as tasks arrive.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace flexkv {

// Unit: threads. The limit is low because cuFile was observed to hang with 256 or more requests in flight,
// and each thread has one request in flight.
inline constexpr int32_t kMaxThreadsPerDisk = 64;

class DiskThreads {
 public:
  // `on_start` is called first in every thread; it makes the GPU current. If it returns an error, every task
  // of that thread gets the error. Throws ConfigError unless 1 <= threads_per_disk <= kMaxThreadsPerDisk.
  DiskThreads(int32_t disks, int32_t threads_per_disk, std::function<std::string()> on_start);
  // Waits until all submitted tasks have finished, and joins the threads. Call abandon() first if a task may
  // never finish.
  ~DiskThreads();
  DiskThreads(const DiskThreads&) = delete;
  DiskThreads& operator=(const DiskThreads&) = delete;

  // Runs `task` on one of the disk's threads. `not_started` is the error that on_start returned in that
  // thread, or empty if it succeeded. The queue has no limit: callers limit the number of their unfinished
  // tasks.
  using Task = std::function<void(const std::string& not_started)>;
  void submit(int32_t disk, Task task);
  // Detaches the threads, which may then outlive this object. They keep everything that they use alive.
  void abandon();
  int32_t started() const;

 private:
  struct Disk;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
