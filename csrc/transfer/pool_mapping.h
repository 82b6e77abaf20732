// The address range of a host pool: anonymous memory of this process, or a sealed memfd that others can map.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

// Unit: bytes. The huge page size of x86-64 and of arm64 with 4 KiB pages.
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

enum class PageSource {
  kAnonymous,  // private; transparent huge pages by MADV_HUGEPAGE
  kMemfd,      // shared; huge pages by touching, then MADV_COLLAPSE
  kHugetlb,    // shared; reserved huge pages
};

class PoolMapping {
 public:
  // `bytes` of anonymous memory on a 2 MiB boundary, not mapped in forked children. Throws CapacityError.
  static PoolMapping anonymous(int64_t bytes, bool huge_pages);
  // A new memfd of `bytes`, sealed against resizing (so that no process can turn a mapping into SIGBUS). It
  // uses reserved huge pages if `huge_pages` is set and enough of them are free, else shared memory. Throws
  // CapacityError.
  static PoolMapping memfd(int64_t bytes, bool huge_pages);
  // Maps `fd`, which must be such a memfd of exactly `bytes`; takes ownership of the fd, even if it throws.
  // Throws ClosedError when it is another file, CapacityError when it cannot be mapped.
  static PoolMapping of_fd(int fd, int64_t bytes, const std::string& what);

  PoolMapping(PoolMapping&& other) noexcept;
  PoolMapping& operator=(PoolMapping&&) = delete;
  ~PoolMapping();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  PageSource source() const { return source_; }

  // Allocates the memory of [offset, offset + bytes) now. If there is none, throws CapacityError instead of
  // letting a later access raise SIGBUS.
  void populate(int64_t offset, int64_t bytes);
  // Asks the kernel to turn the 2 MiB at `offset`, which have been touched, into one huge page. Returns 0 or
  // an errno.
  int collapse(int64_t offset);
  // How many bytes of the mapping are on huge pages in this process, as the kernel reports it.
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
