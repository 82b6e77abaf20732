// Zeros for the slots that will be written next. A file system that gave a file its space without clearing it
// (fallocate) has to note at the first write to each part that it was written: that pass runs at half speed.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/slab_file.h"

namespace flexkv {

// Unit: bytes. What a page that comes meanwhile waits for: about 1 ms at 4 GB/s.
inline constexpr int64_t kZeroFillBytes = int64_t{4} << 20;
// Unit: bytes. A slab has at most so much more cleared than was ever written, so that a large slab that is
// never filled is not written through.
inline constexpr int64_t kZeroFillAheadBytes = int64_t{1} << 30;

// For the thread that owns the disk's I/O, while none is under way: nothing else may write to the slabs.
class ZeroFill {
 public:
  // `slabs`: one a group, the same one for groups that share it.
  explicit ZeroFill(const std::vector<std::shared_ptr<SlabFile>>& slabs);

  // A page was written to this slot of the group's slab.
  void wrote(size_t group, int64_t slot);
  // Writes zeros to the next part that was never written, kZeroFillBytes at most, and waits for it. Bytes
  // written, 0 when there is nothing to do until more pages are written, or -errno.
  int64_t step();

 private:
  struct Slab {
    std::shared_ptr<SlabFile> file;
    int64_t at = 0;       // all before it was written
    int64_t allowed = 0;  // goes to here and not further
  };
  struct Free {
    void operator()(void* memory) const;
  };
  std::vector<Slab> slabs_;
  std::vector<size_t> slab_of_;  // of each group, in slabs_
  std::unique_ptr<std::byte, Free> zeros_;
};

}  // namespace flexkv
