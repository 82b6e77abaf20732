// Chooses the pool's device, and the I/O that reaches its memory, by what the machine has.
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

// GPU `number`, or plain memory for kHostDevice. Unset: the current GPU if there is one, else plain memory.
FLEXKV_EXPORT std::shared_ptr<TransformDevice> choose_device(
    std::optional<int32_t> number, uintptr_t engine_stream, TransformGrid grid = TransformGrid::kBesideModel);

// For plain memory: io_uring, or POSIX calls if the kernel refuses io_uring or `backend` is kThreads. For a
// GPU: cuFile, or if cuFile cannot be opened, the I/O for plain memory followed by a copy. Throws ConfigError
// for kUring if the kernel refuses it, and CapacityError if the device cannot be made current.
FLEXKV_EXPORT std::shared_ptr<FileIo> choose_io(std::shared_ptr<const RawFiles> files,
                                                const std::shared_ptr<TransformDevice>& device,
                                                IoBackend backend = IoBackend::kAuto);

// Why no file of this machine reaches a GPU's memory by GPUDirect Storage; empty if one may. Opens cuFile if
// there is a GPU.
FLEXKV_EXPORT std::string gpudirect_refusal();

// gpudirect_refusal() for the cuFile that `open` opens. Makes `device` current only while it opens and
// releases cuFile, because the thread may be the engine's and may be capturing a graph.
std::string gpudirect_refusal_on(const cuda::Device& device,
                                 const std::function<std::shared_ptr<Cufile>(std::string* why)>& open);

}  // namespace flexkv
