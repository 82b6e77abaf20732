#include "transfer/pool_mapping.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "transfer/memory_limit.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace flexkv {
namespace {

std::string errno_text(int error) { return std::strerror(error); }

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Makes a sealed memfd of `bytes`. Returns -1, with errno set, on failure.
int sealed_memfd(int64_t bytes, unsigned flags) {
  const int fd = memfd_create("flexkv-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
  if (fd < 0) return -1;
  if (ftruncate(fd, bytes) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

}  // namespace

PoolMapping PoolMapping::map(int64_t bytes, int fd, PageSource source) {
  // Reserves more address space than needed, places the mapping on a 2 MiB boundary in it, and unmaps the
  // rest. This is necessary because mmap guarantees only 4 KiB alignment, and huge pages need an address
  // whose alignment matches the file offset's.
  const size_t reserved = static_cast<size_t>(bytes + kHugePageBytes);
  void* space = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    const int error = errno;
    if (fd >= 0) close(fd);
    throw CapacityError("host pool: mmap of " + std::to_string(bytes) + " bytes: " + errno_text(error));
  }
  auto* start = static_cast<std::byte*>(space);
  const auto misalign = reinterpret_cast<uintptr_t>(start) % kHugePageBytes;
  std::byte* base = misalign == 0 ? start : start + (kHugePageBytes - misalign);
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (mmap(base, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    const int error = errno;
    munmap(space, reserved);
    if (fd >= 0) close(fd);
    throw CapacityError("host pool: mmap of " + std::to_string(bytes) + " bytes: " + errno_text(error));
  }
  const int64_t mapped =
      source == PageSource::kHugetlb ? round_up(bytes, kHugePageBytes) : round_up(bytes, 4096);
  if (base != start) munmap(start, static_cast<size_t>(base - start));
  std::byte* end = base + mapped;
  if (end != start + reserved) munmap(end, static_cast<size_t>(start + reserved - end));
  return PoolMapping(base, mapped, fd, source);
}

PoolMapping PoolMapping::anonymous(int64_t bytes, bool huge_pages) {
  PoolMapping mapping = map(bytes, -1, PageSource::kAnonymous);
  // If madvise fails (the kernel is old or built without huge pages), the pool works without huge pages.
  // huge_bytes() later shows how much memory is on huge pages.
  if (madvise(mapping.base_, static_cast<size_t>(mapping.bytes_),
              huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) != 0)
    errno = 0;
  // Makes fork() leave the mapping out of child processes, which do not need the pool. Otherwise fork() would
  // copy pages that a device has pinned, and afterwards the first write to each huge page would copy that
  // page. A failure is ignored.
  madvise(mapping.base_, static_cast<size_t>(mapping.bytes_), MADV_DONTFORK);
  return mapping;
}

PoolMapping PoolMapping::memfd(int64_t bytes, bool huge_pages) {
  if (huge_pages && free_hugetlb_bytes() >= round_up(bytes, kHugePageBytes)) {
    const int fd = sealed_memfd(round_up(bytes, kHugePageBytes), MFD_HUGETLB);
    if (fd >= 0) {
      try {
        return map(round_up(bytes, kHugePageBytes), fd, PageSource::kHugetlb);
      } catch (const CapacityError&) {
        // Another process has taken the reserved huge pages after the check, so the code below uses ordinary
        // shared memory.
      }
    }
  }
  const int fd = sealed_memfd(bytes, 0);
  if (fd < 0) {
    throw CapacityError("host pool: memfd of " + std::to_string(bytes) + " bytes: " + errno_text(errno));
  }
  return map(bytes, fd, PageSource::kMemfd);
}

PoolMapping PoolMapping::of_fd(int fd, int64_t bytes, const std::string& what) {
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool right =
      fstat(fd, &info) == 0 && info.st_size == bytes && seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (!right) {
    close(fd);
    throw ClosedError(what + " is not the pool any more: expected a sealed memfd of " +
                      std::to_string(bytes) + " bytes, found " + std::to_string(info.st_size));
  }
  struct statfs filesystem{};
  const bool hugetlb = fstatfs(fd, &filesystem) == 0 && filesystem.f_type == HUGETLBFS_MAGIC;
  return map(bytes, fd, hugetlb ? PageSource::kHugetlb : PageSource::kMemfd);
}

PoolMapping::PoolMapping(PoolMapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      fd_(std::exchange(other.fd_, -1)),
      source_(other.source_) {}

PoolMapping::~PoolMapping() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

void PoolMapping::populate(int64_t offset, int64_t bytes) {
  if (madvise(base_ + offset, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0) return;
  int error = errno;
  // Linux before 5.14 does not have MADV_POPULATE_WRITE. The code below then touches each page. For a memfd,
  // it first allocates the file's blocks, because touching a page without a block could raise SIGBUS.
  if (error == EINVAL) {
    error = fd_ >= 0 && fallocate(fd_, 0, offset, bytes) != 0 ? errno : 0;
    if (error == 0) {
      for (int64_t at = 0; at < bytes; at += 4096) {
        auto* byte = reinterpret_cast<volatile unsigned char*>(base_ + offset + at);
        *byte = *byte;
      }
      return;
    }
  }
  throw CapacityError("host pool: no memory for " + std::to_string(bytes) + " bytes at offset " +
                      std::to_string(offset) + ": " + errno_text(error));
}

int PoolMapping::collapse(int64_t offset) {
  for (int attempt = 0;; ++attempt) {
    if (madvise(base_ + offset, static_cast<size_t>(kHugePageBytes), MADV_COLLAPSE) == 0) return 0;
    const int error = errno;
    if (error != EAGAIN || attempt == 1) return error;  // a page was busy (EAGAIN): the loop tries once more
  }
}

int64_t PoolMapping::huge_bytes() const {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  const auto low = reinterpret_cast<uintptr_t>(base_);
  const uintptr_t high = low + static_cast<uintptr_t>(bytes_);
  bool ours = false;
  int64_t total = 0;
  while (std::getline(smaps, line)) {
    unsigned long start = 0;
    unsigned long end = 0;
    char name[32] = {};
    long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &start, &end) == 2) {
      // The addresses are in ascending order, so all further mappings are above the pool.
      if (start >= high) break;
      ours = start < high && end > low;
    } else if (ours && std::sscanf(line.c_str(), "%31[^:]: %ld kB", name, &kib) == 2) {
      const std::string field(name);
      if (field == "AnonHugePages" || field == "ShmemPmdMapped" || field == "Shared_Hugetlb" ||
          field == "Private_Hugetlb") {
        total += int64_t{kib} * 1024;
      }
    }
  }
  return total;
}

}  // namespace flexkv
