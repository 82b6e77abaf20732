#include "transfer/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace flexkv {

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  gone_ = fd_ < 0 && errno == ESRCH;
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), fd_(std::exchange(other.fd_, -1)), gone_(other.gone_) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(fd_, other.fd_);
  std::swap(gone_, other.gone_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
}

bool ProcessWatch::ended() const {
  if (gone_) return true;
  if (fd_ < 0) return pid_ > 0 && kill(pid_, 0) != 0 && errno == ESRCH;
  pollfd watched{fd_, POLLIN, 0};
  return ::poll(&watched, 1, 0) == 1;
}

}  // namespace flexkv
