#include "gds/uring_file_io.h"

#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/uring_queue.h"
#include "transfer/deadline.h"

namespace flexkv {
namespace {

// Unit: bytes. Longer calls are made as POSIX calls, because an io_uring request has 32 bits for the length,
// and the kernel cuts longer I/O off at 2 GiB.
constexpr int64_t kLongestBytes = int64_t{1} << 30;
// Unit: seconds. The pause between attempts to get completions from a ring that has failed.
constexpr double kDeafS = 0.1;

// A thread's ring, and the number of the UringFileIo that owns the ring. One ring per thread is enough,
// because a thread serves one manager.
struct ThreadRing {
  uint64_t owner = 0;
  std::unique_ptr<IoQueue> queue;
};

uint64_t next_number() {
  static std::atomic<uint64_t> numbers{0};
  return ++numbers;
}

// Waits for completions. Tries again if the ring fails, because the kernel may still write to the requests'
// memory. If no completion ever comes, this function never returns. The transfer that waits for this thread
// then gives up and leaves the memory to the thread.
void hear(IoQueue& queue, std::vector<IoDone>& done) {
  for (;;) {
    try {
      return queue.wait(done);
    } catch (const DiskError&) {
      std::this_thread::sleep_for(to_duration(kDeafS));
    }
  }
}

}  // namespace

UringFileIo::UringFileIo(std::shared_ptr<const RawFiles> files, WrapQueue wrap)
    : files_(std::move(files)), posix_(files_), wrap_(std::move(wrap)), number_(next_number()) {}

IoQueue* UringFileIo::ring() const {
  thread_local ThreadRing mine;
  if (mine.owner != number_) {
    mine = {number_, nullptr};
    try {
      mine.queue = std::make_unique<UringQueue>(kRingDepth);
      if (wrap_) mine.queue = wrap_(std::move(mine.queue), 0);
    } catch (const DiskError&) {
      // The kernel refuses to make a ring, for example because no locked memory is left.
      mine.queue = nullptr;
    }
  }
  return mine.queue.get();
}

IoOutcome UringFileIo::transfer(const IoCall& call) {
  IoOutcome outcome;
  transfer_all({&call, 1}, {&outcome, 1});
  return outcome;
}

void UringFileIo::transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) {
  IoQueue* queue = ring();
  if (queue == nullptr) return posix_.transfer_all(calls, outcomes);
  int32_t in_flight = 0;
  std::vector<IoDone> done;
  done.reserve(kRingDepth + 1);
  try {
    carry_out(*queue, calls, outcomes, done, in_flight);
  } catch (...) {
    // Waits for the requests in flight, because the kernel may still write to the caller's memory, and the
    // next calls must not get the completions of these requests.
    while (in_flight > 0) {
      done.clear();
      hear(*queue, done);
      in_flight -= static_cast<int32_t>(done.size());
    }
    throw;
  }
}

void UringFileIo::carry_out(IoQueue& queue, std::span<const IoCall> calls, std::span<IoOutcome> outcomes,
                            std::vector<IoDone>& done, int32_t& in_flight) {
  size_t next = 0;
  bool failed = false;
  while (in_flight > 0 || (next < calls.size() && !failed)) {
    for (; next < calls.size() && !failed && in_flight < queue.depth(); ++next) {
      const IoCall& call = calls[next];
      if (call.bytes == 0 || call.bytes > kLongestBytes) {
        outcomes[next] = posix_.transfer(call);
        failed = outcomes[next].bytes != call.bytes;
        continue;
      }
      const RawFiles::File& file = files_->at(call.device, call.file);
      queue.submit({.write = call.write,
                    .fd = route(call) == IoRoute::kDirect ? file.direct_fd : file.buffered_fd,
                    .buffer = static_cast<std::byte*>(call.memory),
                    .bytes = call.bytes,
                    .offset = call.offset,
                    .cookie = next});
      ++in_flight;
    }
    if (in_flight == 0) continue;
    done.clear();
    hear(queue, done);
    in_flight -= static_cast<int32_t>(done.size());
    for (const IoDone& one : done) {
      const IoCall& call = calls[one.cookie];
      outcomes[one.cookie] = finish(call, one.result);
      failed = failed || outcomes[one.cookie].bytes != call.bytes;
    }
  }
}

// Returns the outcome of a call for which the ring returned `result`. If the call moved fewer bytes than
// requested, moves the rest with POSIX calls, which check whether the rest is aligned.
IoOutcome UringFileIo::finish(const IoCall& call, int64_t result) {
  const bool again = result == -EINTR || result == -EAGAIN;
  if (result < 0 && !again) return {0, std::generic_category().message(static_cast<int>(-result))};
  const int64_t moved = again ? 0 : result;
  if (moved == call.bytes) return {moved, {}};
  IoCall rest = call;
  rest.offset += moved;
  rest.bytes -= moved;
  rest.memory = static_cast<std::byte*>(call.memory) + moved;
  IoOutcome outcome = posix_.transfer(rest);
  outcome.bytes += moved;
  return outcome;
}

}  // namespace flexkv
