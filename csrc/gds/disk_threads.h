// A few threads a disk that carry out its I/O, started when the first of it comes.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace flexkv {

// Unit: threads. cuFile was seen to hang from 256 requests in flight on; every thread has one.
inline constexpr int32_t kMaxThreadsPerDisk = 64;

class DiskThreads {
 public:
  // `on_start` runs first in every thread (it sets the GPU); if it returns a reason, every task is given it.
  // Throws ConfigError unless 1 <= threads_per_disk <= kMaxThreadsPerDisk.
  DiskThreads(int32_t disks, int32_t threads_per_disk, std::function<std::string()> on_start);
  // Joins, after the tasks under way have ended; abandon() first where one may never end.
  ~DiskThreads();
  DiskThreads(const DiskThreads&) = delete;
  DiskThreads& operator=(const DiskThreads&) = delete;

  // The argument is on_start's reason. Callers bound how many tasks they have outstanding.
  using Task = std::function<void(const std::string& not_started)>;
  void submit(int32_t disk, Task task);
  // Leaves the threads to themselves: they own what they need.
  void abandon();
  int32_t started() const;

 private:
  struct Disk;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
