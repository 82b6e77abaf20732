#include "share/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace flexkv {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string failed_call(const std::string& what, int64_t bytes, int error) {
  return what + " of " + std::to_string(bytes) + " bytes: " + std::strerror(error);
}

}  // namespace

SharedFile SharedFile::make(const char* name, int64_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw CapacityError(failed_call("a shared memfd", bytes, errno));
  if (ftruncate(fd, bytes) == 0 && fcntl(fd, F_ADD_SEALS, kSizeSeals) == 0) {
    void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) return SharedFile(static_cast<std::byte*>(base), bytes, fd);
  }
  const int error = errno;
  close(fd);
  throw CapacityError(failed_call("a shared memfd", bytes, error));
}

SharedFile SharedFile::read_only(int fd, int64_t bytes, const std::string& what) {
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (bytes <= 0 || !sealed || fstat(fd, &info) != 0 || info.st_size != bytes || info.st_uid != geteuid()) {
    throw ClosedError(what + ": expected a sealed memfd of this user with " + std::to_string(bytes) +
                      " bytes, found " + std::to_string(info.st_size) + " of user " +
                      std::to_string(info.st_uid) + (sealed ? "" : ", unsealed"));
  }
  void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw CapacityError(failed_call(what, bytes, errno));
  // Makes fork() leave the mapping out of child processes, which never read another unit's memory.
  madvise(base, static_cast<size_t>(bytes), MADV_DONTFORK);
  return SharedFile(static_cast<std::byte*>(base), bytes, -1);
}

SharedFile::SharedFile(SharedFile&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_), fd_(std::exchange(other.fd_, -1)) {}

SharedFile::~SharedFile() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

}  // namespace flexkv
