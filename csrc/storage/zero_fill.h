// Writes zeros to the slots that will be written next. If a file system has reserved space without clearing
// it (fallocate), it must record the first write to each part, and such first writes run at half speed.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/slab_file.h"

namespace flexkv {

// Unit: bytes. The size of one write of zeros, which a page that arrives meanwhile has to wait for: about 1
// ms at 4 GB/s.
inline constexpr int64_t kZeroFillBytes = int64_t{4} << 20;
// Unit: bytes. How far zeros go beyond the last slot ever written, so that a large slab that is never filled
// is not written throughout.
inline constexpr int64_t kZeroFillAheadBytes = int64_t{1} << 30;

// Only the thread that owns the disk's I/O uses it, while no I/O is under way, because nothing else may write
// to the slabs meanwhile.
class ZeroFill {
 public:
  // `slabs`: one per group, the same one for groups that share it.
  explicit ZeroFill(const std::vector<std::shared_ptr<SlabFile>>& slabs);

  // Records that a page was written to this slot of the group's slab.
  void wrote(size_t group, int64_t slot);
  // Writes zeros to the next part that was never written, at most kZeroFillBytes of it, and waits for the
  // write. Returns the bytes written, 0 if there is nothing to do until more pages are written, or -errno.
  int64_t step();

 private:
  struct Slab {
    std::shared_ptr<SlabFile> file;
    int64_t at = 0;       // everything before this offset was written
    int64_t allowed = 0;  // zeros go no further than this
  };
  struct Free {
    void operator()(void* memory) const;
  };
  std::vector<Slab> slabs_;
  std::vector<size_t> slab_of_;  // for each group, the index in slabs_
  std::unique_ptr<std::byte, Free> zeros_;
};

}  // namespace flexkv
