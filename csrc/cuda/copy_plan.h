// Lists the runs of pages as copies between a device and host memory. This code only computes, and does not
// call the driver.
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

// Which copy paths the device and its driver support.
struct Capabilities {
  bool kernel = false;
  bool batch = false;
  // Whether streams can wait for one stage of a kernel that is still running.
  bool stage_words = false;
  // Unit: bytes. Two lengths that were measured on this device, one for loads and one for stores: the kernel
  // copies runs that are shorter. Where a length is unset, the built-in length of copy_ways.h applies.
  std::array<std::optional<int64_t>, 2> measured_below = {};
};

// One contiguous copy between device and host memory, in either direction.
struct Copy {
  uintptr_t device = 0;
  std::byte* host = nullptr;
  size_t bytes = 0;
  int64_t piece = 0;     // number of the registered piece of host memory; see PinPieces
  uintptr_t region = 0;  // base address of the region of device memory; see CopyLister
};

// The two memory locations of a page's copy: a block of the inference engine's pool, and the stripe in host
// memory.
struct PageEnds {
  int64_t block = 0;
  std::byte* stripe = nullptr;
  int64_t piece = 0;  // number of the piece in which the stripe's slot was registered; see PinPieces
};

// Lists all runs of some pages as copies, page by page. Each call of next() returns a limited number of them.
// Consecutive runs become one copy if they are in the same piece and the same region, and are contiguous both
// in device memory and in host memory. Empty runs are left out, and copies longer than `longest` bytes are
// cut. Segments whose base addresses are less than a block stride apart belong to the same region, as in
// pools that have all layers in a block. Segments of different regions may be layers that were allocated
// separately, so no copy spans two regions. The caller must keep segments and pages valid as long as the
// lister exists.
class CopyLister {
 public:
  CopyLister(std::span<const Segment> segments, std::span<const PageEnds> pages, int64_t longest);
  bool ended() const { return page_ == pages_.size(); }
  // Replaces the content of `copies` with the next copies: at most `most_copies` copies, with at most
  // `most_bytes` bytes in total. Returns their total size in bytes, which is 0 only if all copies have
  // already been listed.
  int64_t next(int64_t most_bytes, size_t most_copies, std::vector<Copy>& copies);

 private:
  Copy run_from_here() const;
  void skip_empty();
  void go_on(int64_t bytes);

  const std::span<const Segment> segments_;
  const std::span<const PageEnds> pages_;
  const int64_t longest_;
  std::vector<uintptr_t> regions_;  // the region of each segment
  size_t page_ = 0;
  size_t segment_ = 0;
  int64_t offset_ = 0;  // offset in the current run, in bytes
};

}  // namespace flexkv::cuda
