// A queue of reads and writes on one disk. The thread that owns the queue submits requests and waits for
// their results. Any thread may end this wait with wake().
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace flexkv {

struct IoRequest {
  bool write = false;
  int fd = -1;
  std::byte* buffer = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  // A number that the caller chooses for the request, below kReservedCookie; IoDone returns it.
  uint64_t cookie = 0;
};
inline constexpr uint64_t kReservedCookie = ~uint64_t{0};

struct IoDone {
  uint64_t cookie = 0;
  // The number of bytes moved, which may be fewer than requested. If the I/O failed, -errno.
  int64_t result = 0;
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  virtual const char* name() const = 0;
  // The maximum number of I/Os in flight.
  virtual int32_t depth() const = 0;
  // Only the owner thread calls this. Precondition: fewer than depth() I/Os are in flight. It is possible
  // that the I/O starts only at the next wait() or take().
  virtual void submit(const IoRequest& request) = 0;
  // Only the owner thread calls this. Waits until an I/O has finished or another thread has called wake(),
  // then appends the finished I/Os to `done`. Throws DiskError if the kernel refuses to continue. The queue
  // may then never report the I/Os that are in flight.
  virtual void wait(std::vector<IoDone>& done) = 0;
  // Does the same as wait(), but does not wait: starts the I/Os that submit() has not started, and appends
  // the finished I/Os to `done`.
  virtual void take(std::vector<IoDone>& done) = 0;
  // Ends the current wait() of the owner thread. If the owner thread is not waiting, ends its next wait().
  // Any thread may call wake().
  virtual void wake() = 0;
};

// Memory that many requests use. A queue on io_uring registers the memory at the first request that uses it,
// so that the kernel pins the memory's pages once instead of once per request.
struct IoMemory {
  std::byte* base = nullptr;
  int64_t bytes = 0;  // at most 1 GiB, the kernel's limit for one buffer
  // Whether all of the memory has been allocated. The queue registers the memory only when this returns true,
  // because registration would allocate the memory that is not allocated yet.
  std::function<bool()> ready = [] { return true; };
};

// The pieces of memory that a queue may register.
struct IoMemories {
  std::vector<IoMemory> parts = {};
  // If the kernel refuses to register memory, the queue calls this function with the reason. It does so at
  // most once, in the owner's thread. Later requests then use unregistered memory. Required if `parts` is not
  // empty.
  std::function<void(const std::string& reason)> refused = nullptr;
};

enum class IoBackend : int32_t { kAuto = 0, kUring = 1, kThreads = 2 };

// Returns why this process cannot use io_uring, or an empty string if it can. Each call tries to make a ring.
std::string uring_refusal();

// Makes the queue of one disk. Must be called in the owner's thread, because an io_uring may accept requests
// only from the thread that made it. Throws DiskError if `backend` is kUring and the kernel refuses io_uring.
std::unique_ptr<IoQueue> make_io_queue(IoBackend backend, int32_t depth, IoMemories memories = {});

// A function that wraps a disk's queue in another queue. It is called in the owner's thread.
using WrapQueue = std::function<std::unique_ptr<IoQueue>(std::unique_ptr<IoQueue> queue, int32_t disk)>;

// Does the same as a WrapQueue function. It is a class, so that another extension module can implement it.
class QueueWrapper {
 public:
  virtual ~QueueWrapper() = default;
  // Wraps the queue of disk number `disk`. Called in the owner thread of that queue.
  virtual std::unique_ptr<IoQueue> wrap(std::unique_ptr<IoQueue> queue, int32_t disk) = 0;
};

}  // namespace flexkv
