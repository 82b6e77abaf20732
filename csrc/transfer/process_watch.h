// Detects that another process has ended; with pidfd even if its pid has been reused since. An attached
// host pool watches the process that made it. RankOp in flexkv/cache/ledger/ops.py says what becomes of
// the slots of a rank that died.
#pragma once
#include <sys/types.h>

namespace flexkv {

class ProcessWatch {
 public:
  // Watches nothing: ended() is false.
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  // Whether the process has ended, reaped or not. On kernels without pidfd (before Linux 5.3): whether no
  // process has that pid any more.
  bool ended() const;

 private:
  pid_t pid_ = 0;
  int fd_ = -1;
  bool gone_ = false;  // it had ended before it could be watched
};

}  // namespace flexkv
