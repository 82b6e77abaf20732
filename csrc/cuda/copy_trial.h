// Tests whether a copy path copies correctly, before flexkv uses that path for any page.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda/copy_plan.h"
#include "cuda/copy_stream.h"

namespace flexkv::cuda {

// A function that enqueues copies of some segments of some pages with one copy path. It returns an empty
// string on success, otherwise an error message.
using Mover =
    std::function<std::string(Direction, std::span<const Segment>, std::span<const PageEnds>, CopyStream&)>;

// Copies runs of odd lengths to the device and back using `move`, and compares the bytes. Returns an empty
// string if all bytes of the runs came back and no other host byte changed; otherwise an error message.
// Precondition: the device is current.
std::string try_copies(const std::shared_ptr<Device>& device, const Mover& move);

}  // namespace flexkv::cuda
