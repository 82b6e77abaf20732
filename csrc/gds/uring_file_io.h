// File I/O with io_uring, from and to plain memory.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "gds/posix_file_io.h"
#include "io/io_queue.h"

namespace flexkv {

// Unit: I/Os. The depth of one thread's ring. If a page is moved in one piece per layer, each I/O moves one
// piece. A few of these I/Os in flight keep a disk busy.
inline constexpr int32_t kRingDepth = 32;

// Calls take the same routes as in PosixFileIo. Each calling thread has a ring of its own, because an
// io_uring may accept requests only from the thread that made it. A thread that cannot get a ring makes POSIX
// calls.
class UringFileIo : public FileIo {
 public:
  // If `wrap` is set, it is called with each thread's ring and the disk number 0. It returns the queue that
  // the thread uses instead of the ring.
  explicit UringFileIo(std::shared_ptr<const RawFiles> files, WrapQueue wrap = {});
  std::string name() const override { return "io_uring"; }
  IoOutcome transfer(const IoCall& call) override;
  void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) override;
  IoRoute route(const IoCall& call) const override { return posix_.route(call); }
  std::string add_memory(void*, int64_t) override { return {}; }
  void remove_memory(void*) override {}

 private:
  IoQueue* ring() const;
  // Makes all calls through the ring. `in_flight` counts the requests that have not completed, and is correct
  // even if this function throws.
  void carry_out(IoQueue& queue, std::span<const IoCall> calls, std::span<IoOutcome> outcomes,
                 std::vector<IoDone>& done, int32_t& in_flight);
  IoOutcome finish(const IoCall& call, int64_t result);

  const std::shared_ptr<const RawFiles> files_;
  PosixFileIo posix_;
  const WrapQueue wrap_;
  const uint64_t number_;  // identifies this object; no later object has the same number
};

}  // namespace flexkv
