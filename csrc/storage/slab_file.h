// An open slab file. It has a header, followed by slots numbered from 0, each for one slot image.
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

// The file stays open as long as the object exists. If an I/O hangs, its thread keeps a reference to the
// object, so the file stays open and its folder stays locked.
class SlabFile {
 public:
  // Opens the file for reading and writing, or only for reading if `read_only` is set. Uses direct I/O if the
  // file system allows it and the disk needs no alignment above 4 KiB. `lock_fd` is the descriptor of the
  // folder's lock, which the constructor duplicates; -1 means that there is no lock. Throws DiskError if the
  // file cannot be opened, and GeometryError if the shape is invalid.
  SlabFile(std::string path, const SlabShape& shape, int lock_fd, bool read_only = false);
  ~SlabFile();
  SlabFile(const SlabFile&) = delete;
  SlabFile& operator=(const SlabFile&) = delete;

  const std::string& path() const { return path_; }
  const SlabShape& shape() const { return shape_; }
  int fd() const { return fd_; }
  // Whether I/O bypasses the page cache.
  bool direct() const { return buffered_because_.empty(); }
  // Says why I/O goes through the page cache; empty if it does not.
  const std::string& buffered_because() const { return buffered_because_; }
  int64_t offset(int64_t slot) const { return shape_.header_bytes + slot * shape_.slot_bytes; }
  // Waits until all earlier writes are durable (fdatasync). Returns 0 on success, otherwise -errno.
  int sync() const;
  // Returns the first range [begin, end) at or after offset `from` that has no data because it was never
  // written. Returns an empty range at the end of the slab if there is no such range, or if the file system
  // does not report such ranges.
  std::pair<int64_t, int64_t> next_unwritten(int64_t from) const;
  // Whether path() still leads to this file. This is false if the file was deleted, moved or replaced.
  bool in_place() const;

 private:
  std::string path_;
  SlabShape shape_;
  int fd_ = -1;
  int lock_fd_ = -1;
  std::string buffered_because_;
};

}  // namespace flexkv
