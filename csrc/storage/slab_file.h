// One open slab file: a header, then slot images, numbered from 0.
#pragma once
#include <cstdint>
#include <string>
#include <utility>

namespace flexkv {

struct SlabShape {
  int64_t header_bytes = 0;  // a multiple of 4 KiB
  int64_t slot_bytes = 0;    // a multiple of 4 KiB
  int64_t slots = 0;
  uint64_t id = 0;
};

// Stays open while a reference to it exists: an I/O that hangs keeps the file open, and its folder locked.
class SlabFile {
 public:
  // Opens the file for reading and writing, with direct I/O if the file system allows it and 4 KiB alignment
  // is enough for the disk. `lock_fd`: the folder's lock, which the file duplicates, or -1. Throws DiskError,
  // and GeometryError for an impossible shape.
  SlabFile(std::string path, const SlabShape& shape, int lock_fd);
  ~SlabFile();
  SlabFile(const SlabFile&) = delete;
  SlabFile& operator=(const SlabFile&) = delete;

  const std::string& path() const { return path_; }
  const SlabShape& shape() const { return shape_; }
  int fd() const { return fd_; }
  // Whether I/O bypasses the page cache.
  bool direct() const { return buffered_because_.empty(); }
  // Why I/O goes through the page cache; empty if it does not.
  const std::string& buffered_because() const { return buffered_because_; }
  int64_t offset(int64_t slot) const { return shape_.header_bytes + slot * shape_.slot_bytes; }
  // Waits until all earlier writes are on the disk. Returns 0, or -errno.
  int sync() const;
  // Returns the first range [begin, end) from `from` on that has no data yet: it was never written, or is a
  // hole. Returns an empty range at the end of the file if there is none, or if the file system does not
  // report it.
  std::pair<int64_t, int64_t> next_unwritten(int64_t from) const;
  // Whether the path still names this file.
  bool in_place() const;

 private:
  std::string path_;
  SlabShape shape_;
  int fd_ = -1;
  int lock_fd_ = -1;
  std::string buffered_because_;
};

}  // namespace flexkv
