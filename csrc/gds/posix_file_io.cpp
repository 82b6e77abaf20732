#include "gds/posix_file_io.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/align.h"

namespace flexkv {

bool is_aligned(const IoCall& call) {
  return call.offset % kIoAlignBytes == 0 && call.bytes % kIoAlignBytes == 0 &&
         reinterpret_cast<uintptr_t>(call.memory) % kIoAlignBytes == 0;
}

IoRoute PosixFileIo::route(const IoCall& call) const {
  return is_aligned(call) && files_->at(call.device, call.file).direct_fd >= 0 ? IoRoute::kDirect
                                                                               : IoRoute::kBounced;
}

IoOutcome PosixFileIo::transfer(const IoCall& call) {
  const RawFiles::File& file = files_->at(call.device, call.file);
  int fd = route(call) == IoRoute::kDirect ? file.direct_fd : file.buffered_fd;
  IoOutcome outcome;
  while (outcome.bytes < call.bytes) {
    auto* memory = static_cast<std::byte*>(call.memory) + outcome.bytes;
    const auto left = static_cast<size_t>(call.bytes - outcome.bytes);
    const auto offset = static_cast<off_t>(call.offset + outcome.bytes);
    const ssize_t moved = call.write ? pwrite(fd, memory, left, offset) : pread(fd, memory, left, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) {
      outcome.error = std::generic_category().message(errno);
      break;
    }
    if (moved == 0) break;
    outcome.bytes += moved;
    // If a short transfer moved a number of bytes that is not a multiple of 4 KiB, the rest is no longer
    // aligned for direct I/O, and needs the page cache.
    if (outcome.bytes % kIoAlignBytes != 0) fd = file.buffered_fd;
  }
  return outcome;
}

}  // namespace flexkv
