#include "storage/zero_fill.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/align.h"

namespace flexkv {

ZeroFill::ZeroFill(const std::vector<std::shared_ptr<SlabFile>>& slabs) {
  for (const auto& file : slabs) {
    const auto known =
        std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& slab) { return slab.file == file; });
    slab_of_.push_back(static_cast<size_t>(known - slabs_.begin()));
    if (known == slabs_.end()) slabs_.push_back({file, file->offset(0), 0});
  }
}

void ZeroFill::Free::operator()(void* memory) const { std::free(memory); }

void ZeroFill::wrote(size_t group, int64_t slot) {
  Slab& slab = slabs_[slab_of_[group]];
  const int64_t ahead = slab.file->offset(slot + 1) + kZeroFillAheadBytes;
  slab.allowed = std::max(slab.allowed, std::min(ahead, slab.file->offset(slab.file->shape().slots)));
}

int64_t ZeroFill::step() {
  for (Slab& slab : slabs_) {
    while (slab.at < slab.allowed) {
      const auto [begin, end] = slab.file->next_unwritten(slab.at);
      if (begin >= slab.allowed) {
        slab.at = slab.allowed;
        break;
      }
      // Writes zeros only to complete 4 KiB sectors that were never written, so that neighbouring bytes do
      // not change.
      const int64_t from = round_up(begin, kIoAlignBytes);
      const int64_t to = std::min({end, slab.allowed, from + kZeroFillBytes}) / kIoAlignBytes * kIoAlignBytes;
      if (to <= from) {
        slab.at = std::max(end, slab.at + 1);
        continue;
      }
      if (!zeros_) {
        void* memory = std::aligned_alloc(static_cast<size_t>(kIoAlignBytes), kZeroFillBytes);
        if (memory == nullptr) return -ENOMEM;
        std::memset(memory, 0, kZeroFillBytes);
        zeros_.reset(static_cast<std::byte*>(memory));
      }
      const ssize_t written = pwrite(slab.file->fd(), zeros_.get(), static_cast<size_t>(to - from), from);
      if (written < 0) return errno == EINTR ? step() : -errno;
      if (written == 0) return -ENOSPC;
      slab.at = from + written;
      return written;
    }
  }
  zeros_.reset();
  return 0;
}

}  // namespace flexkv
