// A queue of reads and writes on one disk. Its owner thread submits and waits; any thread may wake it.
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
  uint64_t cookie = 0;  // returned in IoDone; below kReservedCookie
};
inline constexpr uint64_t kReservedCookie = ~uint64_t{0};

struct IoDone {
  uint64_t cookie = 0;
  int64_t result = 0;  // bytes moved, which may be fewer than requested, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  virtual const char* name() const = 0;
  // How many I/Os may be under way at once.
  virtual int32_t depth() const = 0;
  // Owner only. Precondition: fewer than depth() are under way. May hold the request back until wait() or
  // take().
  virtual void submit(const IoRequest& request) = 0;
  // Owner only. Waits until an I/O has ended or another thread has called wake(), then appends those that
  // have ended. Throws DiskError if the kernel refuses to continue: requests under way may then never be
  // reported.
  virtual void wait(std::vector<IoDone>& done) = 0;
  // The same without waiting: submits the requests held back, and appends the I/Os that have ended.
  virtual void take(std::vector<IoDone>& done) = 0;
  virtual void wake() = 0;
};

// Memory that many requests will use. io_uring registers it at the first such request, so that the kernel
// pins its pages once instead of once per request.
struct IoMemory {
  std::byte* base = nullptr;
  int64_t bytes = 0;  // at most 1 GiB, the kernel's limit
  // Whether all of it has been allocated. It is not registered before, because that would allocate the rest.
  std::function<bool()> ready = [] { return true; };
};

// The memory to register, if any.
struct IoMemories {
  std::vector<IoMemory> parts = {};
  // Called in the owner's thread, at most once, with the reason why no further memory is registered; later
  // requests then use unregistered memory. Required if there are parts.
  std::function<void(const std::string& reason)> refused = nullptr;
};

enum class IoBackend : int32_t { kAuto = 0, kUring = 1, kThreads = 2 };

// Why this process cannot use io_uring; empty if it can. Asks the kernel each time.
std::string uring_refusal();

// Must be called in the owner's thread, because some rings belong to the thread that made them. Throws
// DiskError if kUring is requested and refused.
std::unique_ptr<IoQueue> make_io_queue(IoBackend backend, int32_t depth, IoMemories memories = {});

// Wraps the queue of a disk in another one; called in the owner's thread.
using WrapQueue = std::function<std::unique_ptr<IoQueue>(std::unique_ptr<IoQueue> queue, int32_t disk)>;

// The same as a class, so that another extension module can implement it.
class QueueWrapper {
 public:
  virtual ~QueueWrapper() = default;
  // Each disk's owner thread calls it.
  virtual std::unique_ptr<IoQueue> wrap(std::unique_ptr<IoQueue> queue, int32_t disk) = 0;
};

}  // namespace flexkv
