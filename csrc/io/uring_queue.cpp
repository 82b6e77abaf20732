#include "io/uring_queue.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace flexkv {

UringQueue::UringQueue(int32_t depth) : depth_(depth), ring_(static_cast<uint32_t>(depth) + 1) {
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw DiskError(std::string("eventfd: ") + std::strerror(errno));
  arm();
}

UringQueue::~UringQueue() { close(wake_fd_); }

io_uring_sqe* UringQueue::sqe() {
  io_uring_sqe* entry = ring_.next_sqe();
  if (entry == nullptr) throw ContractError("more I/Os than the ring has entries");
  return entry;
}

// Lets the ring tell when somebody calls wake().
void UringQueue::arm() {
  io_uring_sqe* entry = sqe();
  entry->opcode = IORING_OP_POLL_ADD;
  entry->fd = wake_fd_;
  entry->poll32_events = POLLIN;
  entry->user_data = kReservedCookie;
}

void UringQueue::submit(const IoRequest& request) {
  io_uring_sqe* entry = sqe();
  entry->opcode = request.write ? IORING_OP_WRITE : IORING_OP_READ;
  entry->fd = request.fd;
  entry->addr = reinterpret_cast<uint64_t>(request.buffer);
  entry->len = static_cast<uint32_t>(request.bytes);
  entry->off = static_cast<uint64_t>(request.offset);
  entry->user_data = request.cookie;
}

// Whether something has ended or somebody called wake().
bool UringQueue::collect(std::vector<IoDone>& done, uint32_t min_complete) {
  const int error = ring_.enter(min_complete);
  // Signals come and go; EAGAIN and EBUSY end when completions have been taken.
  if (error != 0 && error != -EINTR && error != -EAGAIN && error != -EBUSY) {
    throw DiskError(std::string("io_uring_enter: ") + std::strerror(-error));
  }
  bool heard = false;
  while (const io_uring_cqe* cqe = ring_.peek_cqe()) {
    heard = true;
    const IoDone one{cqe->user_data, cqe->res};
    ring_.seen();
    if (one.cookie != kReservedCookie) {
      done.push_back(one);
      continue;
    }
    uint64_t count = 0;
    [[maybe_unused]] const auto bytes = read(wake_fd_, &count, sizeof(count));
    arm();
  }
  return heard;
}

void UringQueue::wait(std::vector<IoDone>& done) {
  while (!collect(done, 1)) {
  }
}

void UringQueue::take(std::vector<IoDone>& done) { collect(done, 0); }

void UringQueue::wake() {
  const uint64_t one = 1;
  // It fails only when the counter is full: then it is readable anyway.
  [[maybe_unused]] const auto bytes = write(wake_fd_, &one, sizeof(one));
}

std::string uring_refusal() {
  try {
    UringQueue probe(1);
    std::vector<IoDone> none;
    probe.wake();
    probe.wait(none);
  } catch (const DiskError& error) {
    return error.what();
  }
  return {};
}

}  // namespace flexkv
