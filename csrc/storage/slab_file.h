// One open slab: a header, then slot images, numbered from 0.
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

// Stays open for as long as anyone holds it: an I/O that hangs keeps the file, and its folder's lock.
class SlabFile {
 public:
  // Opens for reading and writing, past the page cache if the file system allows it and 4 KiB boundaries are
  // enough for the disk. `lock_fd`: the folder's lock, which is duplicated, or -1. Throws DiskError, and
  // GeometryError for an impossible shape.
  SlabFile(std::string path, const SlabShape& shape, int lock_fd);
  ~SlabFile();
  SlabFile(const SlabFile&) = delete;
  SlabFile& operator=(const SlabFile&) = delete;

  const std::string& path() const { return path_; }
  const SlabShape& shape() const { return shape_; }
  int fd() const { return fd_; }
  // Whether I/O goes past the page cache.
  bool direct() const { return buffered_because_.empty(); }
  // Why I/O goes through the page cache; empty if it does not.
  const std::string& buffered_because() const { return buffered_because_; }
  int64_t offset(int64_t slot) const { return shape_.header_bytes + slot * shape_.slot_bytes; }
  // Returns 0 when all earlier writes are on the disk, else -errno.
  int sync() const;
  // The first part [begin, end) from `from` on that has no bytes of its own yet: it was never written, or is
  // a hole. Empty, at the end of the file, if there is none or the file system does not report it.
  std::pair<int64_t, int64_t> next_unwritten(int64_t from) const;
  // Whether the name still leads to this file.
  bool in_place() const;

 private:
  std::string path_;
  SlabShape shape_;
  int fd_ = -1;
  int lock_fd_ = -1;
  std::string buffered_because_;
};

}  // namespace flexkv
