// The interface of a device: the memory that holds the engine's pool and the staging slots, and the processor
// that transforms pages between them. The device is either plain memory with the CPU, or a GPU.
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
  std::string error;             // why no page of the batch may be used; empty if all may
  std::vector<int32_t> bad_run;  // for each page kNoBadRun, or the lowest run whose digest did not match
};

// Runs the transforms of one transfer. Only one thread uses it.
class Transformer {
 public:
  virtual ~Transformer() = default;
  // Starts a batch with one launch. A batch has at most `max_pages` pages, a number that the caller passed to
  // TransformDevice::transformer(). At most kBatchesInFlight batches may be in flight.
  virtual void launch(std::span<const TransformPage> pages) = 0;
  // Waits until no byte of the oldest batch in flight can move any more, and returns that batch's result.
  virtual BatchResult wait() = 0;
};

inline constexpr int32_t kBatchesInFlight = 2;

class TransformDevice {
 public:
  virtual ~TransformDevice() = default;
  virtual std::string name() const = 0;
  // The GPU's number; kHostDevice for plain memory.
  virtual int32_t number() const = 0;
  // Returns memory that is 4 KiB-aligned. Throws CapacityError if there is not enough.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // Unit: bytes. The size of the device's memory; 0 if it is not known.
  virtual int64_t total_bytes() const { return 0; }
  // Unit: bytes. How much of the device's memory disks can access at once (the GPU's BAR1); 0 if that is not
  // known, or if they can access all of it.
  virtual int64_t window_bytes() const { return 0; }
  // Prepares the calling thread for I/O on this device's memory. Every such thread calls it once. Returns an
  // error, or an empty string on success.
  virtual std::string bind_thread() = 0;
  // Calls `work` while this device is current, then restores the thread's previous device, because the thread
  // may be the engine's. Returns what `work` returns, or why the device could not be made current.
  virtual std::string while_current(const std::function<std::string()>& work) = 0;
  // How many pages a batch should have if there are `slots` staging slots.
  virtual int32_t batch_pages(int32_t slots) const = 0;
  // Copies bytes and waits until they are copied. Source and target may each be in this device's memory or in
  // host memory. Returns an error, or an empty string on success.
  virtual std::string copy(void* dst, const void* src, int64_t bytes) = 0;
  // Returns why a transform cannot access this memory, or an empty string if it can.
  virtual std::string cannot_reach(const void* memory, int64_t bytes) const = 0;
  // Returns the transformer of one transfer. Its batches start after `fence` or, if that is null, after the
  // work that the engine has enqueued so far. The batches see the bytes that this work has written.
  virtual std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                                   StreamEvent* fence = nullptr) = 0;
  // Sleeps until the engine's work has reached `fence` or, if that is null, until the work that the engine
  // has enqueued so far has finished. Returns an error, or an empty string on success.
  virtual std::string await_engine(StreamEvent* fence) = 0;
};

inline constexpr int32_t kHostDevice = -1;

// Returns the device of plain memory and the CPU.
std::shared_ptr<TransformDevice> host_transform_device();

// Unit: thread blocks. How many blocks a transform beside the model uses at most. Each block fills the
// registers of one multiprocessor, so a transfer never takes more than this many multiprocessors from the
// model. Together they transform more than 100 GB/s (docs/gpu-results.md), far more than disks deliver.
inline constexpr int kTransformBlocks = 8;

// How many multiprocessors transforms use: a few, so that the model can use the others; or, for measurements,
// all.
enum class TransformGrid { kBesideModel, kWholeDevice };

// Returns the device of GPU `number`. It uses streams of its own, which wait for `engine_stream` (a
// cudaStream_t as a number; 0 is the legacy default stream). Throws ConfigError if the build has no CUDA, if
// there is no such GPU, or if transforms fail their self-test.
std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t engine_stream,
                                                       TransformGrid grid = TransformGrid::kBesideModel);

}  // namespace flexkv
