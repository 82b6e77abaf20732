// Enqueues copies on a stream. There are three paths, as far as the device and its driver support them: a
// kernel, batched copies, or one driver call per copy.
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
  bool batch = true;   // false: cuMemcpyBatchAsync is never used, even if its self-test passes
  bool kernel = true;  // false: the copy kernel is never used
  std::array<std::optional<int64_t>, 2> measured_below = {};  // in bytes; see Capabilities::measured_below
};

struct PathCount {
  int64_t pieces = 0;  // number of kernel launches, or of portions given to the copy engine
  int64_t bytes = 0;
  int64_t calls = 0;  // number of driver calls, or of kernel launches
};

// Copies pages between a GPU and host memory. Several threads may share one Copier if each uses its own
// streams.
class Copier {
 public:
  // Runs the self-tests of batched copies and of the kernel; a path that fails its self-test is not used, and
  // notes() says why. Precondition: the device is current.
  Copier(std::shared_ptr<Device> device, CopyKernels kernels, const CopySwitches& switches);

  // Copies `segments` of `pages` with one kernel launch. All host memory of the pages must be registered with
  // the device. Returns false if nothing was enqueued, because there is no usable kernel, because the stream
  // has no space for the kernel's tables, or because the launch failed. After a failed launch the kernel is
  // not used again. `stages[i]` is the number of segments in stages 0 to i. The kernel copies the stages in
  // order and counts each completed one (see stage_points()). If `stages` is empty, the kernel counts no
  // stages.
  bool launch(Direction direction, std::span<const Segment> segments, std::span<const PageEnds> pages,
              CopyStream& stream, std::span<const size_t> stages = {});
  // Enqueues copies for the copy engine. `registered` says whether all host memory of the copies is
  // registered with the device. Returns an empty string on success, otherwise an error message. After a
  // failure, some of the copies may still be in flight. They have ended once a mark that is enqueued after
  // them (CopyStream::mark()) is reached.
  std::string copy(Direction direction, std::span<const Copy> copies, bool registered, CopyStream& stream);

  Capabilities capabilities() const;
  // Makes `stream` wait: work that is enqueued on `stream` after this call starts only when
  // StageWords::passed has reached `value`. The wait is a small kernel that runs on `stream`. Returns an
  // empty string on success, otherwise why this kernel could not be started. After such a failure, the kernel
  // is not used again, and callers should pass no `stages` to launch().
  std::string wait(const uint32_t* passed, uint32_t value, StreamId stream);
  // Says which copy paths are not used, and why; empty if all are used.
  std::string notes() const;
  // Number of kernel launches that failed after the self-tests.
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
  // Returns an empty string on success, an error message if the launch failed, and nullopt if the stream has
  // no space for the kernel's tables.
  std::optional<std::string> by_kernel(Direction direction, std::span<const Segment> segments,
                                       std::span<const PageEnds> pages, CopyStream& stream,
                                       std::span<const size_t> stages) const;
  std::string by_batch(Direction direction, std::span<const Copy> copies, CopyStream& stream) const;
  std::string single(Direction direction, const Copy& copy, CopyStream& stream) const;

  const std::shared_ptr<Device> device_;
  const CopyKernels kernels_;
  mutable std::mutex mutex_;  // guards capabilities_ and notes_
  Capabilities capabilities_;
  std::string notes_;
  std::atomic<int64_t> failed_launches_{0};
  std::array<Cell, kPaths> counts_;
};

// Must be called after a launch that counts `stages` stages. Returns one event per stage, in the order of the
// stages. Each event is reached when the kernel has copied its stage.
std::vector<std::shared_ptr<StreamEvent>> stage_points(const std::shared_ptr<Copier>& copier,
                                                       CopyStream& stream, int32_t stages);

}  // namespace flexkv::cuda
