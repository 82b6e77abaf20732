#include "io/uring_queue.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace flexkv {

UringQueue::UringQueue(int32_t depth, IoMemories memories)
    : depth_(depth), ring_(static_cast<uint32_t>(depth) + 1), refused_(std::move(memories.refused)) {
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw DiskError(std::string("eventfd: ") + std::strerror(errno));
  arm();
  for (const IoMemory& part : memories.parts) memories_.push_back({part});
  std::sort(memories_.begin(), memories_.end(),
            [](const Memory& a, const Memory& b) { return a.part.base < b.part.base; });
  if (memories_.empty()) return;
  const int error = ring_.reserve_buffers(static_cast<uint32_t>(memories_.size()));
  if (error != 0) refuse("a table of registered buffers", -error);
}

UringQueue::~UringQueue() { close(wake_fd_); }

io_uring_sqe* UringQueue::sqe() {
  io_uring_sqe* entry = ring_.next_sqe();
  if (entry == nullptr) throw ContractError("more I/Os than the ring has entries");
  return entry;
}

// Queues a poll of the eventfd. The ring then reports the next call of wake() as a completion.
void UringQueue::arm() {
  io_uring_sqe* entry = sqe();
  entry->opcode = IORING_OP_POLL_ADD;
  entry->fd = wake_fd_;
  entry->poll32_events = POLLIN;
  entry->user_data = kReservedCookie;
}

void UringQueue::refuse(const char* what, int error) {
  memories_.clear();  // does not affect requests that are in flight in registered memory
  refused_(std::string(what) + ": " + std::strerror(error));
}

// Finds the memory that contains the request's buffer, and returns its index in the table of registered
// buffers. Registers that memory first if needed. Returns -1 if no memory contains the buffer, or if the
// memory cannot be registered at the time of the call.
int32_t UringQueue::registered_place(const IoRequest& request) {
  const auto after = std::upper_bound(
      memories_.begin(), memories_.end(), request.buffer,
      [](const std::byte* buffer, const Memory& memory) { return buffer < memory.part.base; });
  if (after == memories_.begin()) return -1;
  Memory& memory = *(after - 1);
  if (request.buffer + request.bytes > memory.part.base + memory.part.bytes) return -1;
  const auto place = static_cast<int32_t>(&memory - memories_.data());
  if (!memory.registered) {
    if (!memory.part.ready()) return -1;
    const int error = ring_.register_buffer(static_cast<uint32_t>(place), memory.part.base,
                                            static_cast<size_t>(memory.part.bytes));
    if (error != 0) {
      refuse("registering a buffer", -error);
      return -1;
    }
    memory.registered = true;
  }
  return place;
}

void UringQueue::submit(const IoRequest& request) {
  const int32_t place = registered_place(request);
  io_uring_sqe* entry = sqe();
  if (place < 0) {
    entry->opcode = request.write ? IORING_OP_WRITE : IORING_OP_READ;
  } else {
    entry->opcode = request.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    entry->buf_index = static_cast<uint16_t>(place);
  }
  entry->fd = request.fd;
  entry->addr = reinterpret_cast<uint64_t>(request.buffer);
  entry->len = static_cast<uint32_t>(request.bytes);
  entry->off = static_cast<uint64_t>(request.offset);
  entry->user_data = request.cookie;
}

// Submits the queued requests and appends the finished I/Os to `done`. Returns whether any I/O has finished.
// Sets `woken_` if wake() has been called.
bool UringQueue::collect(std::vector<IoDone>& done, uint32_t min_complete) {
  const int error = ring_.enter(min_complete);
  // A signal (EINTR) is ignored. EAGAIN and EBUSY are ignored because they no longer occur once completions
  // have been taken, and the code below takes them.
  if (error != 0 && error != -EINTR && error != -EAGAIN && error != -EBUSY) {
    throw DiskError(std::string("io_uring_enter: ") + std::strerror(-error));
  }
  bool any = false;
  while (const io_uring_cqe* cqe = ring_.peek_cqe()) {
    const IoDone one{cqe->user_data, cqe->res};
    ring_.seen();
    if (one.cookie != kReservedCookie) {
      done.push_back(one);
      any = true;
      continue;
    }
    woken_ = true;
    uint64_t count = 0;
    [[maybe_unused]] const auto bytes = read(wake_fd_, &count, sizeof(count));
    arm();
  }
  return any;
}

void UringQueue::wait(std::vector<IoDone>& done) {
  // If `woken_` is set, an earlier take() has consumed a wake() that has to end this wait.
  while (!collect(done, woken_ ? 0 : 1) && !woken_) {
  }
  woken_ = false;
}

void UringQueue::take(std::vector<IoDone>& done) { collect(done, 0); }

void UringQueue::wake() {
  const uint64_t one = 1;
  // The write fails only if the counter is at its maximum, and then the eventfd is readable anyway.
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
