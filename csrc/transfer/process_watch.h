// Detects that another process has exited. With pidfd, this works even if a new process has got the same pid.
// An attached host pool watches the process that made the pool. RankOp in flexkv/cache/ledger/ops.py
// describes what happens to the slots of a rank whose process died.
#pragma once
#include <sys/types.h>

namespace flexkv {

class ProcessWatch {
 public:
  // Watches no process; ended() is always false.
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  // Whether the process has exited, even if its parent has not reaped it yet. On kernels without pidfd
  // (before Linux 5.3), returns whether no process has the pid any more.
  bool ended() const;

 private:
  pid_t pid_ = 0;
  int fd_ = -1;
  bool gone_ = false;  // whether the process had exited before the watch began
};

}  // namespace flexkv
