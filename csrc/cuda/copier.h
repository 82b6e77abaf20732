// Enqueues copies on a stream, in the ways that the device and its driver offer.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/copy_stream.h"
#include "cuda/device.h"

namespace flexkv::cuda {

struct CopySwitches {
  bool batch = true;   // off: never cuMemcpyBatchAsync, whatever the result of the self-test
  bool kernel = true;  // off: never the kernel
  std::array<std::optional<int64_t>, 2> measured_below = {};  // see Capabilities
};

struct PathCount {
  int64_t pieces = 0;  // launches, or portions of copies
  int64_t bytes = 0;
  int64_t calls = 0;  // driver calls and launches
};

// Several threads may use it, each with its own streams.
class Copier {
 public:
  // Runs the self-tests of batched copies and of the kernel; a path that fails its test is not used, and
  // notes() says why. Precondition: the device is current. Throws CapacityError.
  Copier(std::shared_ptr<Device> device, CopyKernels kernels, const CopySwitches& switches);

  // Copies `segments` of `pages`, all in memory that is registered with the device, with one kernel. False:
  // no copy is enqueued, because there is no kernel or no room for its tables, or because it could not be
  // started. A kernel that could not be started is not tried again. `stages`: for each stage, the number of
  // segments up to its end; the kernel then copies the stages in order and counts them (stage_points()).
  // Empty: it counts nothing.
  bool launch(Direction direction, std::span<const Segment> segments, std::span<const PageEnds> pages,
              CopyStream& stream, std::span<const size_t> stages = {});
  // Gives some copies to the copy engine. `registered`: all their host memory is registered with the device.
  // Empty, or why it failed: some may be under way even then, and only a mark after them shows when they have
  // ended.
  std::string copy(Direction direction, std::span<const Copy> copies, bool registered, CopyStream& stream);

  Capabilities capabilities() const;
  // Makes the work that is enqueued next on the stream start when StageWords::passed has reached `value`.
  // Empty, or why not: a kernel that could not be started is not tried again, and from then on no launch
  // should count stages.
  std::string wait(const uint32_t* passed, uint32_t value, StreamId stream);
  // A description of the paths that are not used and why; empty if all are used.
  std::string notes() const;
  // Kernels that could not be started after their self-test.
  int64_t failed_launches() const { return failed_launches_; }
  PathCount count(Path path) const;

 private:
  struct Cell {
    std::atomic<int64_t> pieces{0}, bytes{0}, calls{0};
  };

  std::string try_path(Path path);
  void note(const std::string& text);
  void give_up(bool Capabilities::* means, const std::string& why);
  void add(Path path, int64_t bytes, int64_t calls);
  // Empty, or why it failed; unset if there is no room for its tables.
  std::optional<std::string> by_kernel(Direction direction, std::span<const Segment> segments,
                                       std::span<const PageEnds> pages, CopyStream& stream,
                                       std::span<const size_t> stages) const;
  std::string by_batch(Direction direction, std::span<const Copy> copies, CopyStream& stream) const;
  std::string single(Direction direction, const Copy& copy, CopyStream& stream) const;

  const std::shared_ptr<Device> device_;
  const CopyKernels kernels_;
  mutable std::mutex mutex_;  // guards the next two
  Capabilities capabilities_;
  std::string notes_;
  std::atomic<int64_t> failed_launches_{0};
  std::array<Cell, kPaths> counts_;
};

// Call after a launch that counts `stages` stages: a point behind each of them, in order.
std::vector<std::shared_ptr<StreamEvent>> stage_points(const std::shared_ptr<Copier>& copier,
                                                       CopyStream& stream, int32_t stages);

}  // namespace flexkv::cuda
