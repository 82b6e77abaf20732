#include "gds/transform/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/error.h"
#include "cuda/device_info.h"
#include "gds/transform/cuda_transforms.h"

namespace flexkv {
namespace {

class CudaTransformDevice : public TransformDevice {
 public:
  CudaTransformDevice(std::shared_ptr<cuda::Device> device, uintptr_t engine_stream, TransformGrid grid,
                      LayoutLauncher launcher)
      : device_(std::move(device)),
        on_{std::make_shared<WorkspacePool>(device_),
            reinterpret_cast<cuda::StreamHandle>(engine_stream == 0 ? cuda::kLegacyStream : engine_stream),
            grid, launcher} {}

  std::string name() const override { return "GPU " + std::to_string(device_->ordinal()); }
  int32_t number() const override { return device_->ordinal(); }

  void* allocate(int64_t bytes) override {
    const cuda::QuietCurrent here(*device_);
    void* memory = nullptr;
    std::string error = here.error();
    if (error.empty()) {
      error = GpuMemory{&driver()}.allocate(&memory, static_cast<size_t>(bytes + kIoAlignBytes));
    }
    if (!error.empty()) throw CapacityError("staging of " + std::to_string(bytes) + " bytes: " + error);
    const auto address = reinterpret_cast<uintptr_t>(memory);
    auto* aligned = reinterpret_cast<void*>((address + kIoAlignBytes - 1) / kIoAlignBytes * kIoAlignBytes);
    const std::lock_guard lock(mutex_);
    allocated_[aligned] = memory;
    return aligned;
  }

  void release(void* memory) override {
    std::map<void*, void*>::node_type found;
    {
      const std::lock_guard lock(mutex_);
      found = allocated_.extract(memory);
    }
    if (found.empty()) return;
    // Frees the memory after releasing the lock, because freeing may wait for all work on the device.
    const cuda::QuietCurrent here(*device_);
    GpuMemory{&driver()}.release(found.mapped());
  }

  std::string bind_thread() override { return cuda::bind_thread(*device_); }

  std::string while_current(const std::function<std::string()>& work) override {
    const cuda::QuietCurrent here(*device_);
    return here.error().empty() ? work() : here.error();
  }

  // A batch has half of the slots, so that the disks can fill the other half while it is transformed.
  int32_t batch_pages(int32_t slots) const override { return std::max(1, slots / 2); }

  // The copy uses a stream of its own. On the legacy stream, the copy would wait for the inference engine's
  // work, and the inference engine's later work would wait for the copy.
  std::string copy(void* dst, const void* src, int64_t bytes) override {
    return on_workspace([&](const CudaWorkspace& space) {
      const cuda::Code code =
          driver().copy_any(reinterpret_cast<uintptr_t>(dst), reinterpret_cast<uintptr_t>(src),
                            static_cast<size_t>(bytes), space.stream.handle());
      return driver().failure(code, "cuMemcpyAsync");
    });
  }

  int64_t total_bytes() const override { return device_->total_bytes(); }
  int64_t window_bytes() const override { return cuda::bar_bytes(device_->pci()); }

  std::string cannot_reach(const void* memory, int64_t bytes) const override {
    const cuda::QuietCurrent here(*device_);
    if (!here.error().empty()) return here.error();
    for (const int64_t at : {int64_t{0}, bytes - 1}) {
      unsigned type = 0;
      const auto address = reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(at);
      const cuda::Code code = driver().pointer_attribute(&type, cuda::kPointerMemoryType, address);
      if (code == cuda::kErrorInvalidValue) {  // the driver does not know the address
        return "memory that is not pinned is out of the GPU's reach: allocate it pinned, or register it";
      }
      if (code != cuda::kSuccess) return driver().error_text(code, "cuPointerGetAttribute");
    }
    return {};
  }

  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                           StreamEvent* fence) override {
    return cuda_transformer(on_, map, into_pool, max_pages, fence);
  }

  std::string await_engine(StreamEvent* fence) override {
    return on_workspace(
        [&](const CudaWorkspace& space) { return fence_stream(on_, space.stream.handle(), fence); });
  }

 private:
  const cuda::Driver& driver() const { return device_->driver(); }

  // Sleeps until the work enqueued on `stream` has finished. Returns an error message, or an empty string on
  // success.
  std::string await(cuda::StreamHandle stream) {
    try {
      return cuda::Event(device_, stream).wait();
    } catch (const CapacityError& error) {
      // No event could be made. So this thread waits for the complete stream, because copies that are
      // enqueued use the caller's memory. If the context is broken, no copy runs any more.
      driver().stream_synchronize(stream);
      return error.what();
    }
  }

  // Enqueues `work` on a workspace's stream and sleeps until it has finished. Returns an error message, or an
  // empty string on success.
  template <typename Work>
  std::string on_workspace(Work work) {
    try {
      const cuda::Current here(*device_);
      auto space = on_.workspaces->take();
      std::string error = work(*space);
      const std::string ended = await(space->stream.handle());
      if (error.empty()) error = ended;
      space->error = error;  // a workspace with an error is not used again
      on_.workspaces->put(std::move(space));
      return error;
    } catch (const CapacityError& error) {
      return error.what();
    }
  }

  const std::shared_ptr<cuda::Device> device_;
  const CudaTransforms on_;
  std::mutex mutex_;
  std::map<void*, void*> allocated_;  // aligned address -> address that the driver returned
};

// Moves a page from the pool to a slot and computes its digests, then moves it to a different block and
// checks the digests. This shows that the kernels can be loaded and that they move the right bytes. Returns
// an error message, or an empty string on success.
std::string self_test(TransformDevice& device) {
  // Unit: bytes. The sizes of a layer-first pool of two layers and two blocks, with runs of an odd length. In
  // each layer, block 1 follows block 0.
  constexpr int64_t kRun = 1237, kStep = 1536, kImage = 3 * kIoAlignBytes;
  constexpr size_t kPool = 4 * kStep;
  const auto free_it = [&](std::byte* memory) { device.release(memory); };
  using Memory = std::unique_ptr<std::byte, decltype(free_it)>;
  const Memory memory(static_cast<std::byte*>(device.allocate(kPool + kImage + kIoAlignBytes)), free_it);
  std::byte* slot = memory.get() + round_up(static_cast<int64_t>(kPool), kIoAlignBytes);
  std::vector<std::byte> content(kPool), back(kPool);
  for (size_t i = 0; i < kPool; ++i) content[i] = static_cast<std::byte>(i * 131 + (i >> 8));
  if (std::string error = device.copy(memory.get(), content.data(), kPool); !error.empty()) return error;
  const auto base = reinterpret_cast<uintptr_t>(memory.get());
  const KvView view({{base, kStep, kRun, 0, 0}, {base + 2 * kStep, kStep, kRun, kRun, 1}}, 2, 2 * kRun);
  const PageMap map = PageMap::stripe(view, {0, kIoAlignBytes, kIoAlignBytes, 2 * kIoAlignBytes}, true);
  for (const bool into_pool : {false, true}) {
    const auto transformer = device.transformer(map, into_pool, 1);
    const TransformPage page{reinterpret_cast<uintptr_t>(slot), into_pool ? 1 : 0};
    transformer->launch(std::span(&page, 1));
    const BatchResult result = transformer->wait();
    if (!result.error.empty()) return result.error;
    if (result.bad_run.front() != kNoBadRun) return "a digest did not match";
  }
  if (std::string error = device.copy(back.data(), memory.get(), kPool); !error.empty()) return error;
  for (const size_t run : {0, 2}) std::memcpy(&content[(run + 1) * kStep], &content[run * kStep], kRun);
  return content == back ? std::string() : "other bytes came back";
}

void require_launcher(int number, LayoutLauncher launcher) {
  if (launcher != nullptr) return;
  throw ConfigError("GPU " + std::to_string(number) + ": this is a build without CUDA; allowed is " +
                    std::to_string(kHostDevice) + " (plain memory)");
}

}  // namespace

std::shared_ptr<TransformDevice> cuda_transform_device(std::shared_ptr<cuda::Device> device,
                                                       uintptr_t engine_stream, TransformGrid grid,
                                                       LayoutLauncher launcher) {
  require_launcher(device->ordinal(), launcher);
  const std::string what = "GPU " + std::to_string(device->ordinal());
  auto transforms = std::make_shared<CudaTransformDevice>(std::move(device), engine_stream, grid, launcher);
  const std::string failure = self_test(*transforms);
  if (!failure.empty()) throw ConfigError(what + ": self-test of the layout transform: " + failure);
  return transforms;
}

std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t engine_stream,
                                                       TransformGrid grid) {
  require_launcher(number, layout_launcher());
  return cuda_transform_device(cuda::Device::open(number), engine_stream, grid, layout_launcher());
}

}  // namespace flexkv
