#include "gds/bounced_file_io.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "base/align.h"

namespace flexkv {
namespace {

// Unit: bytes. The size of a thread's buffer. A longer call is made in pieces of this size. The size is a
// multiple of 4 KiB, so that the pieces of an aligned call are aligned.
constexpr int64_t kBounceBytes = 4 << 20;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Returns the calling thread's buffer. A thread keeps its buffer until it ends, so that only its first call
// allocates memory.
void* bounce_buffer() {
  thread_local const std::unique_ptr<void, Free> buffer(std::aligned_alloc(kIoAlignBytes, kBounceBytes));
  if (!buffer) throw std::bad_alloc();
  return buffer.get();
}

}  // namespace

IoOutcome BouncedFileIo::transfer(const IoCall& call) {
  void* buffer = bounce_buffer();
  IoOutcome outcome;
  while (outcome.bytes < call.bytes) {
    IoCall piece = call;
    piece.offset += outcome.bytes;
    piece.bytes = std::min(kBounceBytes, call.bytes - outcome.bytes);
    piece.memory = buffer;
    void* memory = static_cast<std::byte*>(call.memory) + outcome.bytes;
    if (call.write) outcome.error = device_->copy(buffer, memory, piece.bytes);
    if ((outcome.of_memory = !outcome.error.empty())) return outcome;
    const IoOutcome moved = inner_->transfer(piece);
    if (!call.write && moved.bytes > 0) outcome.error = device_->copy(memory, buffer, moved.bytes);
    if ((outcome.of_memory = !outcome.error.empty())) return outcome;
    outcome.bytes += moved.bytes;
    outcome.error = moved.error;
    if (!outcome.error.empty() || moved.bytes != piece.bytes) return outcome;
  }
  return outcome;
}

}  // namespace flexkv
