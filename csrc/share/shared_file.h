// Memory that one process writes and other processes of the same user read: a memfd sealed against resizing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flexkv {

// A mapping of a sealed memfd. The object owns the memfd's descriptor if it made the memfd.
class SharedFile {
 public:
  // Makes a memfd of `bytes` zero bytes, seals it against resizing, and maps it for reading and writing.
  // Throws CapacityError if a system call fails.
  static SharedFile make(const char* name, int64_t bytes);
  // Maps another process's memfd of exactly `bytes` bytes, read-only. The caller still owns `fd`. Throws
  // ClosedError if the file has a different size, is not sealed, or belongs to another user. Throws
  // CapacityError if the file cannot be mapped.
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
  int fd_;  // the memfd's descriptor; -1 if the mapping is read-only
};

}  // namespace flexkv
