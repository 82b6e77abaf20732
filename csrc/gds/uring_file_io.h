// File I/O with io_uring, to and from plain memory.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "gds/posix_file_io.h"
#include "io/io_queue.h"

namespace flexkv {

// Unit: I/Os. The depth of one thread's ring. In a per-layer transfer each I/O is one piece of a page, and a
// few of them keep a disk busy.
inline constexpr int32_t kRingDepth = 32;

// Routes are the same as for POSIX calls. Each calling thread has a ring of its own, because some rings
// belong to the thread that made them; a thread that gets no ring makes POSIX calls.
class UringFileIo : public FileIo {
 public:
  // `wrap` decorates each thread's ring; the disk number it gets is 0.
  explicit UringFileIo(std::shared_ptr<const RawFiles> files, WrapQueue wrap = {});
  std::string name() const override { return "io_uring"; }
  IoOutcome transfer(const IoCall& call) override;
  void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) override;
  IoRoute route(const IoCall& call) const override { return posix_.route(call); }
  std::string add_memory(void*, int64_t) override { return {}; }
  void remove_memory(void*) override {}

 private:
  IoQueue* ring() const;
  // `in_flight`: requests that have not completed, also if this throws.
  void carry_out(IoQueue& queue, std::span<const IoCall> calls, std::span<IoOutcome> outcomes,
                 std::vector<IoDone>& done, int32_t& in_flight);
  IoOutcome finish(const IoCall& call, int64_t result);

  const std::shared_ptr<const RawFiles> files_;
  PosixFileIo posix_;
  const WrapQueue wrap_;
  const uint64_t number_;  // identifies this object; never used again
};

}  // namespace flexkv
