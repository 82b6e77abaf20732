// Chooses the device of a pool and the kind of I/O that reaches the device's memory, from what the machine
// offers.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/export.h"
#include "gds/file_io.h"
#include "gds/raw_files.h"
#include "gds/transform/device.h"
#include "io/io_queue.h"

namespace flexkv {

namespace cuda {
class Device;
}  // namespace cuda
class Cufile;

// Returns the TransformDevice of GPU `number`, or of plain memory for kHostDevice. If `number` is unset,
// returns the current GPU or, without a GPU, plain memory.
FLEXKV_EXPORT std::shared_ptr<TransformDevice> choose_device(
    std::optional<int32_t> number, uintptr_t engine_stream, TransformGrid grid = TransformGrid::kBesideModel);

// Returns an I/O object for a device's memory. For plain memory it uses io_uring, or POSIX calls if the
// kernel refuses io_uring or `backend` is kThreads. For a GPU it uses cuFile. If cuFile cannot be opened, it
// uses the I/O for plain memory and an additional copy. Throws ConfigError if `backend` is kUring and the
// kernel refuses io_uring, and CapacityError if the device cannot be made current.
FLEXKV_EXPORT std::shared_ptr<FileIo> choose_io(std::shared_ptr<const RawFiles> files,
                                                const std::shared_ptr<TransformDevice>& device,
                                                IoBackend backend = IoBackend::kAuto);

// Returns why GPUDirect Storage cannot move bytes between a GPU's memory and any file on this machine.
// Returns an empty string if it may be able to do so. Opens cuFile if there is a GPU.
FLEXKV_EXPORT std::string gpudirect_refusal();

// Does the same as gpudirect_refusal(), with the cuFile that `open` opens. `device` is current only while
// cuFile is opened and released: the calling thread may belong to the inference engine and may be capturing a
// CUDA graph.
std::string gpudirect_refusal_on(const cuda::Device& device,
                                 const std::function<std::shared_ptr<Cufile>(std::string* why)>& open);

}  // namespace flexkv
