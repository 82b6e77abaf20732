// Runs each disk's I/O on a few threads, which are started as tasks arrive.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace flexkv {

// Unit: threads. cuFile was seen to hang with 256 or more requests in flight, and every thread has one.
inline constexpr int32_t kMaxThreadsPerDisk = 64;

class DiskThreads {
 public:
  // `on_start` runs first in every thread (it binds the GPU); if it returns an error, every task gets that
  // error. Throws ConfigError unless 1 <= threads_per_disk <= kMaxThreadsPerDisk.
  DiskThreads(int32_t disks, int32_t threads_per_disk, std::function<std::string()> on_start);
  // Joins the threads after all submitted tasks have ended; call abandon() first if one may never end.
  ~DiskThreads();
  DiskThreads(const DiskThreads&) = delete;
  DiskThreads& operator=(const DiskThreads&) = delete;

  // `not_started` is on_start's error, empty on success. Callers limit how many tasks they have outstanding.
  using Task = std::function<void(const std::string& not_started)>;
  void submit(int32_t disk, Task task);
  // Detaches the threads, which own everything that they use.
  void abandon();
  int32_t started() const;

 private:
  struct Disk;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace flexkv
