// The memory that holds the engine's pool and the staging slots, and the processor that transforms between
// them: plain memory and the CPU, or a GPU.
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
  std::string error;             // why none of the batch's pages may be used; empty if they may
  std::vector<int32_t> bad_run;  // per page: kNoBadRun, or the lowest run whose digest did not match
};

// The transforms of one transfer. Used by one thread.
class Transformer {
 public:
  virtual ~Transformer() = default;
  // Starts one batch of at most transformer()'s `max_pages` pages with one launch. At most kBatchesInFlight
  // batches may be under way.
  virtual void launch(std::span<const TransformPage> pages) = 0;
  // Waits until no byte of the oldest batch under way can move any more, and returns its result.
  virtual BatchResult wait() = 0;
};

inline constexpr int32_t kBatchesInFlight = 2;

class TransformDevice {
 public:
  virtual ~TransformDevice() = default;
  virtual std::string name() const = 0;
  // The GPU's number; kHostDevice for plain memory.
  virtual int32_t number() const = 0;
  // 4 KiB-aligned. Throws CapacityError.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // 0: not known.
  virtual int64_t total_bytes() const { return 0; }
  // How much of its memory disks can access at once: the GPU's BAR1. 0: not known, or all of it.
  virtual int64_t window_bytes() const { return 0; }
  // Every thread that will do I/O on this device's memory calls it once. Returns an error; empty on success.
  virtual std::string bind_thread() = 0;
  // Calls `work` with this device current, then makes the thread's previous one current again: the thread may
  // be the engine's. Returns what `work` returns, or why the device could not be made current.
  virtual std::string while_current(const std::function<std::string()>& work) = 0;
  // How many pages to put into one batch if there are `slots` staging slots.
  virtual int32_t batch_pages(int32_t slots) const = 0;
  // Copies within and between this device's memory and the host's; returns when done. Returns an error; empty
  // on success.
  virtual std::string copy(void* dst, const void* src, int64_t bytes) = 0;
  // Why a transform cannot access this memory; empty if it can.
  virtual std::string cannot_reach(const void* memory, int64_t bytes) const = 0;
  // Returns a transformer whose batches start after `fence` or, without one, after the work that the engine
  // has enqueued so far, and see what that work has written.
  virtual std::unique_ptr<Transformer> transformer(const PageMap& map, bool into_pool, int32_t max_pages,
                                                   StreamEvent* fence = nullptr) = 0;
  // Sleeps until `fence` or, without one, the work that the engine has enqueued so far is reached. Returns
  // why it never will be; empty on success.
  virtual std::string await_engine(StreamEvent* fence) = 0;
};

inline constexpr int32_t kHostDevice = -1;

// The device of plain memory.
std::shared_ptr<TransformDevice> host_transform_device();

// Unit: thread blocks. Each fills the registers of one SM, so that a transfer never takes more than this many
// SMs from the model. Twice as many would be far faster than the disks.
inline constexpr int kTransformBlocks = 8;

// How many multiprocessors transforms use: a few, beside the model, or all of them, for measurements.
enum class TransformGrid { kBesideModel, kWholeDevice };

// GPU `number`, with streams of its own that wait for `engine_stream` (a cudaStream_t as a number; 0 is the
// legacy default stream). Throws ConfigError if the build has no CUDA, if there is no such device, or if
// transforms fail their self-test.
std::shared_ptr<TransformDevice> cuda_transform_device(int32_t number, uintptr_t engine_stream,
                                                       TransformGrid grid = TransformGrid::kBesideModel);

}  // namespace flexkv
