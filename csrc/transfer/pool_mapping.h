// The memory of a host pool: anonymous memory of this process, or a sealed memfd that other processes can
// map.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

// Unit: bytes. The huge page size of x86-64 and of arm64 with 4 KiB base pages.
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

enum class PageSource {
  kAnonymous,  // private memory; it gets transparent huge pages through MADV_HUGEPAGE
  kMemfd,      // shared memory; after it is allocated, MADV_COLLAPSE turns it into huge pages
  kHugetlb,    // shared memory on reserved huge pages
};

class PoolMapping {
 public:
  // Maps `bytes` of anonymous memory on a 2 MiB boundary. Forked children do not have the mapping. Throws
  // CapacityError if there is no address space.
  static PoolMapping anonymous(int64_t bytes, bool huge_pages);
  // Makes and maps a memfd of `bytes`. The memfd is sealed against resizing, because accesses beyond the end
  // of a shrunk file would raise SIGBUS. The memory is on reserved huge pages if `huge_pages` is set and
  // enough of them are free; otherwise it is ordinary shared memory. Throws CapacityError if the memfd cannot
  // be made or mapped.
  static PoolMapping memfd(int64_t bytes, bool huge_pages);
  // Maps `fd`, a memfd of exactly `bytes` that memfd() made. Takes ownership of `fd`, also when this function
  // throws. Throws ClosedError if `fd` is a different file, and CapacityError if `fd` cannot be mapped.
  // `what`: what the caller is mapping, for error messages.
  static PoolMapping of_fd(int fd, int64_t bytes, const std::string& what);

  PoolMapping(PoolMapping&& other) noexcept;
  PoolMapping& operator=(PoolMapping&&) = delete;
  ~PoolMapping();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  PageSource source() const { return source_; }

  // Allocates the memory of [offset, offset + bytes) now. Throws CapacityError if there is not enough memory.
  // Without this call, a later access could raise SIGBUS in that case.
  void populate(int64_t offset, int64_t bytes);
  // Asks the kernel to turn the 2 MiB at `offset` into one huge page. Returns 0 on success, otherwise the
  // errno. Precondition: the memory is populated.
  int collapse(int64_t offset);
  // Returns how many bytes of the mapping are on huge pages in this process, according to the kernel.
  int64_t huge_bytes() const;

 private:
  PoolMapping(std::byte* base, int64_t bytes, int fd, PageSource source)
      : base_(base), bytes_(bytes), fd_(fd), source_(source) {}
  static PoolMapping map(int64_t bytes, int fd, PageSource source);

  std::byte* base_;
  int64_t bytes_;
  int fd_;
  PageSource source_;
};

}  // namespace flexkv
