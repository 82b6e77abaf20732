// Tests, before any page is copied, whether copies bring the right bytes.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda/copy_plan.h"
#include "cuda/copy_stream.h"

namespace flexkv::cuda {

// Enqueues segments of pages in one way. Empty, or why it failed.
using Mover =
    std::function<std::string(Direction, std::span<const Segment>, std::span<const PageEnds>, CopyStream&)>;

// Copies some odd runs there and back by `move`, and compares them. Empty if they arrived and nothing else
// changed. Precondition: the device is current.
std::string try_copies(const std::shared_ptr<Device>& device, const Mover& move);

}  // namespace flexkv::cuda
