#include "gds/transform/cuda_transforms.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/error.h"
#include "gds/transform/tables.h"

namespace flexkv {
namespace {

cuda::DeviceAddress address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

class CudaTransformer : public Transformer {
 public:
  CudaTransformer(const CudaTransforms& on, const PageMap& map, bool into_pool, size_t max_pages,
                  StreamEvent* fence)
      : on_(on), device_(on.workspaces->device()), tables_(map, into_pool) {
    const cuda::Current here(*device_);
    space_ = on_.workspaces->take();
    space_->error = prepare(max_pages, fence);
  }

  ~CudaTransformer() override {
    const cuda::QuietCurrent here(*device_);
    // Enqueued work reads tables_ and writes slots, so it must have finished before they are freed.
    const std::string error = await_stream();
    if (space_->error.empty()) space_->error = error;
    on_.workspaces->put(std::move(space_));
  }

  void launch(std::span<const TransformPage> pages) override {
    const cuda::QuietCurrent here(*device_);
    Pending pending{next_, pages.size(), space_->error};
    if (pending.error.empty()) pending.error = here.error();
    if (pending.error.empty()) pending.error = enqueue(space_->batches[next_], pages);
    pending_.push_back(std::move(pending));
    next_ = (next_ + 1) % space_->batches.size();
  }

  BatchResult wait() override {
    const cuda::QuietCurrent here(*device_);
    const Pending pending = std::move(pending_.front());
    pending_.pop_front();
    CudaBatchBuffers& buffers = space_->batches[pending.buffers];
    BatchResult result{pending.error, {}};
    if (result.error.empty()) result.error = buffers.ended->wait();
    if (!result.error.empty()) {
      // A part of the batch may have been enqueued, and must have finished before the pages are reported as
      // failed. An error of await_stream() is ignored: if the context is broken, no copy runs any more, and
      // the batch already has its error.
      await_stream();
      return result;
    }
    const auto* bad = buffers.host_bad_run.as<int32_t>();
    result.bad_run.assign(bad, bad + pending.pages);
    return result;
  }

 private:
  struct Pending {
    size_t buffers;
    size_t pages;
    std::string error;
  };

  const cuda::Driver& driver() const { return device_->driver(); }
  cuda::StreamHandle stream() const { return space_->stream.handle(); }

  std::string await_stream() const {
    return driver().failure(driver().stream_synchronize(stream()), "cuStreamSynchronize");
  }

  template <typename T>
  std::string upload(const GrowingBuffer<GpuMemory>& target, const T* source, size_t count) {
    return driver().failure(
        driver().copy_to_device(address_of(target.as<T>()), source, count * sizeof(T), stream()),
        "cuMemcpyHtoDAsync");
  }

  std::string prepare(size_t max_pages, StreamEvent* fence) {
    std::string error = space_->error;
    const auto step = [&](const auto& action) {
      if (error.empty()) error = action();
    };
    step([&] { return space_->runs.reserve(tables_.runs.size() * sizeof(TransformRun)); });
    step([&] { return space_->leaves.reserve(tables_.leaves.size() * sizeof(TransformLeaf)); });
    for (CudaBatchBuffers& batch : space_->batches) {
      step([&] { return batch.host_pages.reserve(max_pages * sizeof(TransformPage)); });
      step([&] { return batch.host_bad_run.reserve(max_pages * sizeof(int32_t)); });
      step([&] { return batch.pages.reserve(max_pages * sizeof(TransformPage)); });
      step([&] { return batch.bad_run.reserve(max_pages * sizeof(int32_t)); });
      step([&] { return batch.progress.reserve(max_pages * tables_.runs.size() * sizeof(RunProgress)); });
    }
    step([&] { return upload(space_->runs, tables_.runs.data(), tables_.runs.size()); });
    step([&] { return upload(space_->leaves, tables_.leaves.data(), tables_.leaves.size()); });
    // Batches start after the work that the inference engine has enqueued. That work may still write blocks
    // that the batches read, or read blocks that the batches write.
    step([&] { return fence_stream(on_, stream(), fence); });
    return error;
  }

  std::string enqueue(CudaBatchBuffers& buffers, std::span<const TransformPage> pages) {
    const size_t count = pages.size();
    std::copy(pages.begin(), pages.end(), buffers.host_pages.as<TransformPage>());
    std::fill_n(buffers.host_bad_run.as<int32_t>(), count, kNoBadRun);
    std::string error = upload(buffers.pages, buffers.host_pages.as<TransformPage>(), count);
    if (error.empty()) error = upload(buffers.bad_run, buffers.host_bad_run.as<int32_t>(), count);
    if (error.empty() && has_digests(tables_.mode)) {
      error =
          driver().failure(driver().memset_bytes(address_of(buffers.progress.as<RunProgress>()), 0,
                                                 count * tables_.runs.size() * sizeof(RunProgress), stream()),
                           "cuMemsetD8Async");
    }
    if (!error.empty()) return error;
    TransformBatch batch = host_batch(tables_);
    batch.runs = space_->runs.as<TransformRun>();
    batch.leaves = space_->leaves.as<TransformLeaf>();
    batch.pages = buffers.pages.as<TransformPage>();
    batch.progress = buffers.progress.as<RunProgress>();
    batch.bad_run = buffers.bad_run.as<int32_t>();
    batch.num_pages = static_cast<int32_t>(count);
    error = on_.launcher(batch, on_.grid, device_->multiprocessors(), stream());
    if (!error.empty()) return error;
    error = driver().failure(
        driver().copy_to_host(buffers.host_bad_run.as<int32_t>(), address_of(buffers.bad_run.as<int32_t>()),
                              count * sizeof(int32_t), stream()),
        "cuMemcpyDtoHAsync");
    if (!error.empty()) return error;
    try {
      buffers.ended = std::make_unique<cuda::Event>(device_, stream());
    } catch (const CapacityError& failure) {
      return failure.what();
    }
    return {};
  }

  const CudaTransforms on_;
  const std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<CudaWorkspace> space_;
  TransformTables tables_;
  std::deque<Pending> pending_;
  size_t next_ = 0;
};

}  // namespace

std::string fence_stream(const CudaTransforms& on, cuda::StreamHandle stream, StreamEvent* fence) {
  const auto id = reinterpret_cast<StreamId>(stream);
  if (fence != nullptr) return fence->make_wait(id);
  try {
    const auto engine = reinterpret_cast<StreamId>(on.engine_stream);
    return cuda::record_engine(on.workspaces->device(), engine)->make_wait(id);
  } catch (const Error& error) {
    return error.what();
  }
}

std::unique_ptr<Transformer> cuda_transformer(const CudaTransforms& on, const PageMap& map, bool into_pool,
                                              int32_t max_pages, StreamEvent* fence) {
  return std::make_unique<CudaTransformer>(on, map, into_pool, static_cast<size_t>(max_pages), fence);
}

}  // namespace flexkv
