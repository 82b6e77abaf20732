// The interface of a device: the memory with the inference engine's pool and the staging slots, and the
// processor that transforms (copies and rearranges) pages between pool and slots. The device is either plain
// memory with the CPU, or a GPU.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gds/page_map.h"
#include "gds/transform/arithmetic.h"
#include "transfer/stream_event.h"

namespace flexkv {

struct BatchResult {
  std::string error;  // why no page of the batch may be used; empty if there was no such error
  // For each page, the lowest number of a run whose digest did not match; kNoBadRun if all match.
  std::vector<int32_t> bad_run;
};

// Runs the transforms of one transfer. Not thread-safe.
class Transformer {
 public:
  virtual ~Transformer() = default;
  // Starts a batch with one launch. A batch has at most as many pages as `max_pages` in the call of
  // TransformDevice::transformer(). At most kBatchesInFlight batches may be in flight.
  virtual void launch(std::span<const TransformPage> pages) = 0;
  // Waits until no byte of the oldest batch in flight is being moved any more. Returns the result of this
  // batch.
  virtual BatchResult wait() = 0;
};

inline constexpr int32_t kBatchesInFlight = 2;

class TransformDevice {
 public:
  virtual ~TransformDevice() = default;
  virtual std::string name() const = 0;
  // The GPU's number; kHostDevice for plain memory.
  virtual int32_t number() const = 0;
  // Returns memory that is 4 KiB-aligned. Throws CapacityError if there is not enough memory.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // Unit: bytes. The size of the device's memory; 0 if it is not known.
  virtual int64_t total_bytes() const { return 0; }
  // Unit: bytes. The size of the part of the device's memory that disks can access at the same time (the
  // GPU's BAR1); 0 if this is not known, or if disks can access all of the memory.
  virtual int64_t window_bytes() const { return 0; }
  // Prepares the calling thread for I/O on this device's memory. Every thread that makes such I/O calls this
  // function once. Returns an error message, or an empty string on success.
  virtual std::string bind_thread() = 0;
  // Calls `work` while this device is current, then restores the thread's previous device, because the thread
  // may be one of the inference engine's. Returns what `work` returns, or why the device could not be made
  // current.
  virtual std::string while_current(const std::function<std::string()>& work) = 0;
  // Returns how many pages a batch should have if there are `slots` staging slots.
  virtual int32_t batch_pages(int32_t slots) const = 0;
  // Copies bytes and waits until they are copied. Source and target may each be in this device's memory or in
  // host memory. Returns an error message, or an empty string on success.
  virtual std::string copy(void* dst, const void* src, int64_t bytes) = 0;
  // Returns why a transform cannot access this memory, or an empty string if it can.
  virtual std::string cannot_reach(const void* memory, int64_t bytes) const = 0;
  // Returns the transformer of one transfer. Its batches start after `fence` or, if `fence` is null, after
  // the work that the inference engine has enqueued so far. The batches see the bytes that this work has
  // written.
  virtual std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                                   StreamEvent* fence = nullptr) = 0;
  // Sleeps until the inference engine's work has reached `fence`. If `fence` is null, sleeps until the work
  // that the inference engine has enqueued so far has finished. Returns an error message, or an empty string
  // on success.
  virtual std::string await_engine(StreamEvent* fence) = 0;
};

inline constexpr int32_t kHostDevice = -1;

// Returns the TransformDevice for plain memory, whose processor is the CPU.
std::shared_ptr<TransformDevice> host_transform_device();

// Unit: thread blocks. The maximum number of thread blocks of a transform with kBesideModel. Each thread
// block fills the registers of one multiprocessor, so a transfer never takes more than this many
// multiprocessors from the model. Together these multiprocessors transform more than 100 GB/s
// (docs/gpu-results.md), far more than disks deliver.
inline constexpr int kTransformBlocks = 8;

// How many multiprocessors transforms use: a few (kBesideModel), so that the model can use the others; or all
// (kWholeDevice), for measurements.
enum class TransformGrid { kBesideModel, kWholeDevice };

// Returns the TransformDevice of GPU `number`. It uses streams of its own, which wait for `engine_stream`,
// the inference engine's stream (a cudaStream_t as a number; 0 is the legacy default stream). Throws
// ConfigError if the build has no CUDA, if there is no such GPU, or if transforms fail their self-test.
std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t engine_stream,
                                                       TransformGrid grid = TransformGrid::kBesideModel);

}  // namespace flexkv
