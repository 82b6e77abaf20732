// Tests whether a copy path copies correctly, before flexkv uses the path for any page.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda/copy_plan.h"
#include "cuda/copy_stream.h"

namespace flexkv::cuda {

// Enqueues the copies of some segments of some pages on one path. Returns an empty string on
// success, otherwise the reason.
using Mover =
    std::function<std::string(Direction, std::span<const Segment>, std::span<const PageEnds>, CopyStream&)>;

// Copies runs of odd lengths to the device and back using `move`, and compares them. Returns an empty string
// if all bytes of the runs came back and no other host byte changed; otherwise what went wrong. Precondition:
// the device is current.
std::string try_copies(const std::shared_ptr<Device>& device, const Mover& move);

}  // namespace flexkv::cuda
