#include "storage/slab_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/align.h"
#include "base/direct_io.h"
#include "base/error.h"
#include "base/path_check.h"

namespace flexkv {
namespace {

// Unit: bytes. The maximum size of a slab. A larger slab is refused as a mistake. Offsets below this limit
// are far from overflow.
constexpr int64_t kMostSlabBytes = int64_t{1} << 60;

}  // namespace

SlabFile::SlabFile(std::string path, const SlabShape& shape, int lock_fd, bool read_only)
    : path_(std::move(path)), shape_(shape) {
  if (shape.header_bytes <= 0 || shape.header_bytes % kIoAlignBytes != 0 || shape.slot_bytes <= 0 ||
      shape.slot_bytes % kIoAlignBytes != 0 || shape.slots < 0 || shape.header_bytes > kMostSlabBytes) {
    throw GeometryError(path_ + ": header of " + std::to_string(shape.header_bytes) + " bytes, slots of " +
                        std::to_string(shape.slot_bytes) + ": must be multiples of " +
                        std::to_string(kIoAlignBytes));
  }
  if (shape.slots > (kMostSlabBytes - shape.header_bytes) / shape.slot_bytes) {
    throw GeometryError(path_ + ": " + std::to_string(shape.slots) + " slots of " +
                        std::to_string(shape.slot_bytes) + " bytes: a slab has at most " +
                        std::to_string(kMostSlabBytes) + " bytes");
  }
  require_no_nul<DiskError>(path_);
  const int flags = (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC;
  fd_ = open(path_.c_str(), flags | O_DIRECT);
  if (fd_ < 0 && errno == EINVAL) {
    buffered_because_ = "this file system has no direct I/O";
  } else if (fd_ >= 0) {
    buffered_because_ = direct_io_refusal(fd_);
    if (!buffered_because_.empty()) close(fd_);
  }
  if (!buffered_because_.empty()) fd_ = open(path_.c_str(), flags);
  if (fd_ < 0) throw DiskError(path_ + ": " + std::strerror(errno));
  try {
    if (lock_fd >= 0 && (lock_fd_ = fcntl(lock_fd, F_DUPFD_CLOEXEC, 0)) < 0) {
      throw DiskError(path_ + ": copying the folder's lock: " + std::strerror(errno));
    }
  } catch (...) {
    close(fd_);
    throw;
  }
}

SlabFile::~SlabFile() {
  close(fd_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

int SlabFile::sync() const {
  while (fdatasync(fd_) != 0) {
    if (errno != EINTR) return -errno;
  }
  return 0;
}

std::pair<int64_t, int64_t> SlabFile::next_unwritten(int64_t from) const {
  const int64_t size = offset(shape_.slots);
  const off_t begin = lseek(fd_, from, SEEK_HOLE);
  if (begin < 0 || begin >= size) return {size, size};
  const off_t end = lseek(fd_, begin, SEEK_DATA);
  return {begin, end < 0 ? size : std::min<int64_t>(end, size)};
}

bool SlabFile::in_place() const {
  struct stat open_file{};
  struct stat named{};
  return fstat(fd_, &open_file) == 0 && stat(path_.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

}  // namespace flexkv
