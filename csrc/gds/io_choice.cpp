#include "gds/io_choice.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/device_info.h"
#include "gds/bounced_file_io.h"
#include "gds/cufile_io.h"
#include "gds/cufile_shim.h"
#include "gds/posix_file_io.h"
#include "gds/uring_file_io.h"

namespace flexkv {

std::shared_ptr<TransformDevice> choose_device(std::optional<int32_t> number, uintptr_t engine_stream,
                                               TransformGrid grid) {
  if (!number) {
    // `built`: whether this is a build with the CUDA toolkit, which kernels need.
    const cuda::Info info = cuda::device_info();
    number = info.built && info.device_count > 0 ? cuda::current_device() : kHostDevice;
  }
  if (*number == kHostDevice) return host_transform_device();
  return cuda_transform_device(*number, engine_stream, grid);
}

namespace {

std::shared_ptr<FileIo> plain_io(const std::shared_ptr<const RawFiles>& files, IoBackend backend) {
  if (backend == IoBackend::kThreads) return std::make_shared<PosixFileIo>(files);
  const std::string why = uring_refusal();
  if (why.empty()) return std::make_shared<UringFileIo>(files);
  if (backend == IoBackend::kUring) throw ConfigError("io is 'uring', which the kernel refuses: " + why);
  return std::make_shared<PosixFileIo>(files);
}

std::shared_ptr<FileIo> chosen_io(std::shared_ptr<const RawFiles> files,
                                  const std::shared_ptr<TransformDevice>& device, IoBackend backend) {
  auto plain = plain_io(files, backend);
  if (device->number() == kHostDevice) return plain;
  std::string why;
  const auto cufile = shared_cufile(cuda::device_info().device_count, &why, device->total_bytes());
  auto bounced = std::make_shared<BouncedFileIo>(std::move(plain), device, why);
  if (cufile == nullptr) return bounced;
  return std::make_shared<CufileIo>(cufile, std::move(files), std::move(bounced));
}

}  // namespace

// Makes the device current when the I/O object is made and when it is destroyed, because cuFile registers
// memory with the current context.
std::shared_ptr<FileIo> choose_io(std::shared_ptr<const RawFiles> files,
                                  const std::shared_ptr<TransformDevice>& device, IoBackend backend) {
  std::shared_ptr<FileIo> io;
  const std::string refused = device->while_current([&] {
    io = chosen_io(std::move(files), device, backend);
    return std::string();
  });
  if (io == nullptr) throw CapacityError(device->name() + ": " + refused);
  FileIo* inner = io.get();
  return {inner, [io = std::move(io), device](FileIo*) mutable {
            device->while_current([&] {
              io.reset();
              return std::string();
            });
          }};
}

std::string gpudirect_refusal() {
  const int32_t gpus = cuda::device_info().device_count;
  if (gpus < 1) return "no GPU";
  try {
    const auto device = cuda::Device::open(cuda::current_device());
    return gpudirect_refusal_on(
        *device, [&](std::string* why) { return shared_cufile(gpus, why, device->total_bytes()); });
  } catch (const Error& error) {
    return error.what();
  }
}

std::string gpudirect_refusal_on(const cuda::Device& device,
                                 const std::function<std::shared_ptr<Cufile>(std::string* why)>& open) {
  const cuda::QuietCurrent here(device);
  if (!here.error().empty()) return here.error();
  std::string why;
  const auto cufile = open(&why);
  if (cufile == nullptr) return why;
  return cufile->direct_by().empty() ? kCufileCompat : std::string();
}

}  // namespace flexkv
