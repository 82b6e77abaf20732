// Writes zeros to the slots that pages will be written to next. fallocate() reserves space in the file
// system, but does not clear it. The file system must record the first write to each part of that space, so
// first writes have only half the speed. If zeros are written in advance, the writes of pages are not first
// writes.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/slab_file.h"

namespace flexkv {

// Unit: bytes. The size of one write of zeros. A page that arrives during the write has to wait for it, about
// 1 ms at 4 GB/s.
inline constexpr int64_t kZeroFillBytes = int64_t{4} << 20;
// Unit: bytes. How far zeros are written beyond the last slot to which a page was written. Without this
// limit, a large slab would be filled with zeros even if its pages never fill it.
inline constexpr int64_t kZeroFillAheadBytes = int64_t{1} << 30;

// Writes zeros to the slabs of one disk. Only the disk's I/O thread uses this object, and only while no other
// I/O is in flight, because nothing else may write to the slabs during a write of zeros.
class ZeroFill {
 public:
  // `slabs`: the slab of each group; the same slab for groups that share it.
  explicit ZeroFill(const std::vector<std::shared_ptr<SlabFile>>& slabs);

  // Records that a page was written to `slot` of the group's slab.
  void wrote(size_t group, int64_t slot);
  // Writes zeros to the next range that was never written, at most kZeroFillBytes, and waits for the write.
  // Returns the number of bytes written, or 0 if there is nothing to do until more pages are written. If the
  // write failed, returns -errno.
  int64_t step();

 private:
  struct Slab {
    std::shared_ptr<SlabFile> file;
    int64_t at = 0;       // offset before which no zeros need to be written any more
    int64_t allowed = 0;  // offset up to which zeros may be written for now
  };
  struct Free {
    void operator()(void* memory) const;
  };
  std::vector<Slab> slabs_;
  std::vector<size_t> slab_of_;  // for each group, the index in slabs_
  std::unique_ptr<std::byte, Free> zeros_;
};

}  // namespace flexkv
