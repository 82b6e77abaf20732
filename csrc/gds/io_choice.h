// What a machine has: the device of the pool, and the I/O that reaches its memory.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/export.h"
#include "gds/file_io.h"
#include "gds/raw_files.h"
#include "gds/transform_device.h"
#include "io/io_queue.h"

namespace flexkv {

namespace cuda {
class Device;
}  // namespace cuda
class Cufile;

// GPU `number`, or plain memory for kHostDevice. Unset: the current GPU where there is one, else plain
// memory.
FLEXKV_EXPORT std::shared_ptr<TransformDevice> choose_device(
    std::optional<int32_t> number, uintptr_t engine_stream, TransformGrid grid = TransformGrid::kBesideModel);

// For plain memory io_uring, or POSIX calls where the kernel refuses that or `backend` is kThreads; for a GPU
// cuFile, or the same with a copy where cuFile cannot be had. Throws ConfigError for kUring where it is
// refused.
FLEXKV_EXPORT std::shared_ptr<FileIo> choose_io(std::shared_ptr<const RawFiles> files,
                                                const std::shared_ptr<TransformDevice>& device,
                                                IoBackend backend = IoBackend::kAuto);

// Why no file of this machine reaches a GPU's memory by GPUDirect Storage; empty where one may. Opens cuFile
// where there is a GPU.
FLEXKV_EXPORT std::string gpudirect_refusal();

// The same of what `open` opens, which is opened and let go with `device` current: the thread may be the
// engine's, and capture a graph.
std::string gpudirect_refusal_on(const cuda::Device& device,
                                 const std::function<std::shared_ptr<Cufile>(std::string* why)>& open);

}  // namespace flexkv
