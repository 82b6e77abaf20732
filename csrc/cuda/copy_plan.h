// How the runs of some pages are listed as copies between a device and host memory. Arithmetic only: no
// driver.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "layout/segment.h"

namespace flexkv::cuda {

enum class Direction { kToDevice, kToHost };

enum class Path {
  kKernel,  // a kernel on one or two multiprocessors reads or writes host memory
  kBatch,   // cuMemcpyBatchAsync
  kSingle,  // one call per copy
};
inline constexpr int kPaths = 3;
const char* to_string(Path path);

// The abilities of the device and its driver.
struct Capabilities {
  bool kernel = false;
  bool batch = false;
  bool stage_words = false;  // streams can wait for one stage of a kernel that still runs
  // Unit: bytes. For loads and for stores: the kernel copies shorter runs, as was measured on this device.
  // Nothing: the built-in lengths of copy_ways.h.
  std::array<std::optional<int64_t>, 2> measured_below = {};
};

// One contiguous copy, in either direction.
struct Copy {
  uintptr_t device = 0;
  std::byte* host = nullptr;
  size_t bytes = 0;
  int64_t piece = 0;     // of host memory; see PinPieces
  uintptr_t region = 0;  // of device memory: different numbers may be different allocations
};

// A page to copy: a block of the engine's pool and its stripe.
struct PageEnds {
  int64_t block = 0;
  std::byte* stripe = nullptr;
  int64_t piece = 0;  // the piece with which the stripe's slot was registered
};

// Lists all runs of some pages as copies, page by page and some at a time. Neighbours in one piece and region
// that are contiguous on both sides make one copy, and empty runs none; a copy that would be longer than
// `longest` is cut. Segments that lie within each other's blocks belong to one region, as in pools with all
// layers in a block; other segments may be layers that were allocated separately. Segments and pages must
// live as long as the lister.
class CopyLister {
 public:
  CopyLister(std::span<const Segment> segments, std::span<const PageEnds> pages, int64_t longest);
  bool ended() const { return page_ == pages_.size(); }
  // Replaces `copies` by the next ones: at most `most_copies`, of at most `most_bytes` in all. Returns their
  // bytes; 0 only at the end.
  int64_t next(int64_t most_bytes, size_t most_copies, std::vector<Copy>& copies);

 private:
  Copy run_from_here() const;
  void skip_empty();
  void go_on(int64_t bytes);

  const std::span<const Segment> segments_;
  const std::span<const PageEnds> pages_;
  const int64_t longest_;
  std::vector<uintptr_t> regions_;  // per segment
  size_t page_ = 0;
  size_t segment_ = 0;
  int64_t offset_ = 0;  // into the run
};

}  // namespace flexkv::cuda
