// Copies that are tried before a page is: whether they bring the right bytes, and how long they take.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda/copy_plan.h"
#include "cuda/device_memory.h"
#include "cuda/event.h"
#include "cuda/pinned_memory.h"

namespace flexkv::cuda {

// Enqueues segments of pages by one means. Empty, or why it failed.
using Mover =
    std::function<std::string(Direction, std::span<const Segment>, std::span<const PageEnds>, StreamHandle)>;

// Precondition, here and below: the device is current.

// Some odd runs there and back by `move`, compared. Empty if they arrived and nothing else changed.
std::string try_copies(const std::shared_ptr<Device>& device, const Mover& move);

// Takes the time of copies between memory of its own.
class CopyClock {
 public:
  // Throws CapacityError.
  explicit CopyClock(std::shared_ptr<Device> device);

  // Unit: seconds of the device, the least of some tries. `runs` runs of `run_bytes`, kMostMeasuredBytes in
  // all at most, with as much memory between them on the device; `move` is called twice before it is waited
  // for. 0 where it refuses, and where the clock stands still. Throws CapacityError.
  double runs_s(Direction direction, int64_t run_bytes, int64_t runs, const Mover& move);

 private:
  double once_s(Direction direction, const Segment& segment, std::span<const PageEnds> pages,
                const Mover& move);

  const std::shared_ptr<Device> device_;
  const DeviceMemory on_device_;
  const PinnedMemory host_;
  const Stream stream_;
};

}  // namespace flexkv::cuda
