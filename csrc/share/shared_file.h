// Memory that one process writes and others of the same user read: a sealed memfd.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

// A mapping of a sealed memfd; it keeps its own descriptor.
class SharedFile {
 public:
  // Makes a memfd of `bytes` zero bytes, sealed against resizing, and maps it to be written. Throws
  // CapacityError.
  static SharedFile make(const char* name, int64_t bytes);
  // Maps another process's memfd of exactly `bytes`, to be read only. The caller keeps `fd`. Throws
  // ClosedError if it is another file, is not sealed, or belongs to another user; CapacityError if it cannot
  // be mapped.
  static SharedFile read_only(int fd, int64_t bytes, const std::string& what);

  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&&) = delete;
  ~SharedFile();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  SharedFile(std::byte* base, int64_t bytes, int fd) : base_(base), bytes_(bytes), fd_(fd) {}

  std::byte* base_;
  int64_t bytes_;
  int fd_;  // -1 for a mapping that is only read
};

}  // namespace flexkv
