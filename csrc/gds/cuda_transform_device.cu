#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "base/align.h"
#include "base/error.h"
#include "gds/cuda_workspace.cuh"
#include "gds/gds_layout_transform.cuh"
#include "gds/transform_device.h"
#include "gds/transform_tables.h"

namespace flexkv {
namespace {

// Workspaces between transfers. Outlives the device object while a transformer uses one.
class WorkspacePool {
 public:
  explicit WorkspacePool(int number) : number_(number) {}
  ~WorkspacePool() {
    const CurrentGpu gpu(number_);
    free_.clear();
  }
  int number() const { return number_; }
  // With the GPU current.
  std::unique_ptr<CudaWorkspace> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto workspace = std::move(free_.back());
        free_.pop_back();
        return workspace;
      }
    }
    return std::make_unique<CudaWorkspace>();
  }
  // Only one whose work has ended.
  void put(std::unique_ptr<CudaWorkspace> workspace) {
    if (!workspace->error.empty()) return;
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(workspace));
  }

 private:
  const int number_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaWorkspace>> free_;
};

// Makes a workspace's stream wait for the fence, or for what the engine's stream has been given. Empty, or
// why it could not.
std::string fence_stream(const CudaWorkspace& space, cudaStream_t engine_stream, StreamEvent* fence) {
  if (fence != nullptr) return fence->make_wait(reinterpret_cast<StreamId>(space.stream));
  std::string error = cuda_error(cudaEventRecord(space.engine_fence, engine_stream), "cudaEventRecord");
  if (!error.empty()) return error;
  return cuda_error(cudaStreamWaitEvent(space.stream, space.engine_fence, 0), "cudaStreamWaitEvent");
}

class CudaTransformer : public Transformer {
 public:
  CudaTransformer(std::shared_ptr<WorkspacePool> pool, const PageMap& map, bool into_pool, int32_t max_pages,
                  cudaStream_t engine_stream, StreamEvent* fence, int blocks)
      : pool_(std::move(pool)), tables_(map, into_pool), blocks_(blocks) {
    const CurrentGpu gpu(pool_->number());
    space_ = pool_->take();
    space_->error = prepare(gpu.error(), static_cast<size_t>(max_pages), engine_stream, fence);
  }

  ~CudaTransformer() override {
    const CurrentGpu gpu(pool_->number());
    // Whatever was enqueued reads tables_ and writes slots: it must end before they go.
    if (cudaStreamSynchronize(space_->stream) != cudaSuccess) {
      space_->error = cuda_error(cudaGetLastError(), "cudaStreamSynchronize");
      if (space_->error.empty()) space_->error = "the stream failed";
    }
    pool_->put(std::move(space_));
  }

  void launch(std::span<const TransformPage> pages) override {
    const CurrentGpu gpu(pool_->number());
    Pending pending{next_, pages.size(), space_->error};
    if (pending.error.empty()) pending.error = gpu.error();
    if (pending.error.empty()) pending.error = enqueue(space_->batches[next_], pages);
    pending_.push_back(std::move(pending));
    next_ = (next_ + 1) % space_->batches.size();
  }

  BatchResult wait() override {
    const CurrentGpu gpu(pool_->number());
    const Pending pending = std::move(pending_.front());
    pending_.pop_front();
    CudaBatchBuffers& buffers = space_->batches[pending.buffers];
    BatchResult result{pending.error, {}};
    if (result.error.empty())
      result.error = cuda_error(cudaEventSynchronize(buffers.ended), "cudaEventSynchronize");
    if (!result.error.empty()) {
      // Parts of the batch may have been enqueued: they end before their pages are called failed.
      if (cudaStreamSynchronize(space_->stream) != cudaSuccess) cudaGetLastError();
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

  template <typename T>
  std::string upload(const GrowingBuffer<DeviceMemory>& target, const T* source, size_t count) {
    return cuda_error(
        cudaMemcpyAsync(target.as<T>(), source, count * sizeof(T), cudaMemcpyHostToDevice, space_->stream),
        "cudaMemcpyAsync");
  }

  std::string prepare(const std::string& not_current, size_t max_pages, cudaStream_t engine_stream,
                      StreamEvent* fence) {
    std::string error = not_current.empty() ? space_->error : not_current;
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
    // After what the engine has enqueued: it may still write what is to be read, or read what is to be
    // written.
    step([&] { return fence_stream(*space_, engine_stream, fence); });
    return error;
  }

  std::string enqueue(CudaBatchBuffers& buffers, std::span<const TransformPage> pages) {
    const size_t count = pages.size();
    std::copy(pages.begin(), pages.end(), buffers.host_pages.as<TransformPage>());
    std::fill_n(buffers.host_bad_run.as<int32_t>(), count, kNoBadRun);
    std::string error = upload(buffers.pages, buffers.host_pages.as<TransformPage>(), count);
    if (error.empty()) error = upload(buffers.bad_run, buffers.host_bad_run.as<int32_t>(), count);
    if (error.empty() && has_digests(tables_.mode)) {
      error = cuda_error(cudaMemsetAsync(buffers.progress.as<RunProgress>(), 0,
                                         count * tables_.runs.size() * sizeof(RunProgress), space_->stream),
                         "cudaMemsetAsync");
    }
    if (!error.empty()) return error;
    TransformBatch batch = host_batch(tables_);
    batch.runs = space_->runs.as<TransformRun>();
    batch.leaves = space_->leaves.as<TransformLeaf>();
    batch.pages = buffers.pages.as<TransformPage>();
    batch.progress = buffers.progress.as<RunProgress>();
    batch.bad_run = buffers.bad_run.as<int32_t>();
    batch.num_pages = static_cast<int32_t>(count);
    error =
        cuda_error(launch_layout_transform(batch, blocks_, space_->stream), "the layout transform's launch");
    if (!error.empty()) return error;
    error = cuda_error(cudaMemcpyAsync(buffers.host_bad_run.as<int32_t>(), buffers.bad_run.as<int32_t>(),
                                       count * sizeof(int32_t), cudaMemcpyDeviceToHost, space_->stream),
                       "cudaMemcpyAsync");
    return error.empty() ? cuda_error(cudaEventRecord(buffers.ended, space_->stream), "cudaEventRecord")
                         : error;
  }

  std::shared_ptr<WorkspacePool> pool_;
  std::unique_ptr<CudaWorkspace> space_;
  TransformTables tables_;
  const int blocks_;
  std::deque<Pending> pending_;
  size_t next_ = 0;
};

// A thread's own stream for copies: the legacy stream would wait for the engine's work, and it for ours.
class CopyStream {
 public:
  CopyStream() {
    error_ = cuda_error(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CopyStream() {
    if (stream_ != nullptr && cudaStreamDestroy(stream_) != cudaSuccess) cudaGetLastError();
  }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  std::string copy(void* dst, const void* src, size_t bytes) {
    std::string error = error_;
    if (error.empty()) {
      error = cuda_error(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    }
    return error.empty() ? cuda_error(cudaStreamSynchronize(stream_), "cudaStreamSynchronize") : error;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::string error_;
};

class CudaTransformDevice : public TransformDevice {
 public:
  CudaTransformDevice(int number, uintptr_t engine_stream, TransformGrid grid)
      : number_(number),
        engine_stream_(engine_stream == 0 ? cudaStreamLegacy : reinterpret_cast<cudaStream_t>(engine_stream)),
        workspaces_(std::make_shared<WorkspacePool>(number)) {
    int count = 0, multiprocessors = 1;
    if (const std::string why = cuda_error(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); !why.empty()) {
      throw ConfigError("GPU " + std::to_string(number) + ": " + why);
    }
    if (number < 0 || number >= count) {
      throw ConfigError("GPU " + std::to_string(number) + ": this machine has " + std::to_string(count));
    }
    const CurrentGpu gpu(number_);
    std::string error = gpu.error();
    if (error.empty()) {
      error = cuda_error(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, number_),
                         "cudaDeviceGetAttribute");
    }
    if (!error.empty()) throw ConfigError("GPU " + std::to_string(number) + ": " + error);
    blocks_ = grid == TransformGrid::kWholeDevice ? multiprocessors * kTransformBlocksPerMultiprocessor
                                                  : std::min(kTransformBlocks, multiprocessors);
  }

  std::string name() const override { return "GPU " + std::to_string(number_); }
  int32_t number() const override { return number_; }

  void* allocate(int64_t bytes) override {
    const CurrentGpu gpu(number_);
    void* memory = nullptr;
    std::string error = gpu.error();
    if (error.empty()) {
      error = cuda_error(cudaMalloc(&memory, static_cast<size_t>(bytes + kIoAlignBytes)), "cudaMalloc");
    }
    if (!error.empty()) throw CapacityError("staging of " + std::to_string(bytes) + " bytes: " + error);
    const auto address = reinterpret_cast<uintptr_t>(memory);
    auto* aligned = reinterpret_cast<void*>((address + kIoAlignBytes - 1) / kIoAlignBytes * kIoAlignBytes);
    const std::lock_guard lock(mutex_);
    allocated_[aligned] = memory;
    return aligned;
  }

  void release(void* memory) override {
    const CurrentGpu gpu(number_);
    const std::lock_guard lock(mutex_);
    const auto found = allocated_.find(memory);
    if (found == allocated_.end()) return;
    if (cudaFree(found->second) != cudaSuccess) cudaGetLastError();
    allocated_.erase(found);
  }

  std::string bind_thread() override { return cuda_error(cudaSetDevice(number_), "cudaSetDevice"); }
  // Half of the slots: while they are transformed the disks fill the others.
  int32_t batch_pages(int32_t slots) const override { return std::max(1, slots / 2); }

  std::string copy(void* dst, const void* src, int64_t bytes) override {
    const CurrentGpu gpu(number_);
    if (!gpu.error().empty()) return gpu.error();
    thread_local std::map<int, CopyStream> streams;
    return streams[number_].copy(dst, src, static_cast<size_t>(bytes));
  }

  std::string cannot_reach(const void* memory, int64_t bytes) const override {
    const CurrentGpu gpu(number_);
    for (const int64_t at : {int64_t{0}, bytes - 1}) {
      cudaPointerAttributes found{};
      std::string error =
          cuda_error(cudaPointerGetAttributes(&found, static_cast<const std::byte*>(memory) + at),
                     "cudaPointerGetAttributes");
      if (!error.empty()) return error;
      if (found.type == cudaMemoryTypeUnregistered) {
        return "memory that is not pinned is out of the GPU's reach: allocate it pinned, or register it";
      }
    }
    return {};
  }

  std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                           StreamEvent* fence) override {
    return std::make_unique<CudaTransformer>(workspaces_, map, into_pool, max_pages, engine_stream_, fence,
                                             blocks_);
  }

  std::string await_engine(StreamEvent* fence) override {
    const CurrentGpu gpu(number_);
    if (!gpu.error().empty()) return gpu.error();
    auto space = workspaces_->take();
    std::string error = space->error;
    const cudaEvent_t reached = space->batches[0].ended;
    if (error.empty()) error = fence_stream(*space, engine_stream_, fence);
    if (error.empty()) error = cuda_error(cudaEventRecord(reached, space->stream), "cudaEventRecord");
    if (error.empty()) error = cuda_error(cudaEventSynchronize(reached), "cudaEventSynchronize");
    space->error = error;  // one that failed is not used again
    workspaces_->put(std::move(space));
    return error;
  }

 private:
  const int number_;
  const cudaStream_t engine_stream_;
  std::shared_ptr<WorkspacePool> workspaces_;
  int blocks_ = 1;
  std::mutex mutex_;
  std::map<void*, void*> allocated_;  // aligned -> as allocated
};

}  // namespace

std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t engine_stream,
                                                       TransformGrid grid) {
  return std::make_shared<CudaTransformDevice>(number, engine_stream, grid);
}

}  // namespace flexkv
