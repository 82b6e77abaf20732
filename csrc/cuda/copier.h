// Enqueues planned copies on a stream, by the means that the device and its driver have.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/copy_trial.h"
#include "cuda/copy_ways.h"
#include "cuda/device.h"

namespace flexkv::cuda {

struct CopySwitches {
  bool batch = true;     // off: never cuMemcpyBatchAsync, whatever the self-test says
  bool kernel = true;    // off: never the kernel
  bool measure = false;  // on: ways and pieces by what copies take here, else constants
};

struct PathCount {
  int64_t pieces = 0;
  int64_t bytes = 0;
  int64_t calls = 0;  // driver calls and launches
};

// Made with the device current; used by one thread.
class Copier {
 public:
  // Runs the self-tests of batched copies and of the kernel; what fails its test is not used, and `notes()`
  // says why. Then measures, if that is asked for, in a few tenths of a second. Throws CapacityError.
  Copier(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Copies `segments` of `pages`. A kernel that cannot be started is not tried again: its runs, and from then
  // on all, go by the copy engine; where there is no memory for its tables, these runs do. `registered`: all
  // host bytes are known to the device, else no kernel.
  // `staging` names the kernel's tables, of which a direction may have kStagings in use; kNoStaging: no
  // kernel. Empty, or why it failed: then some copies may be under way all the same, and only an event after
  // them says when they have ended.
  std::string enqueue(Direction direction, std::span<const Segment> segments, std::span<const PageEnds> pages,
                      bool registered, int staging, StreamHandle stream);

  // The next two: by any thread.
  Capabilities capabilities() const;
  // What is not used and why, in words; empty when everything is.
  std::string notes() const;
  // Kernels that could not be started after their self-test: 0 or 1, as none follows it.
  int64_t failed_launches() const { return failed_launches_; }
  PathCount count(Path path) const;
  // The next two: of the start, for good.
  const Ways& ways(Direction direction) const { return measured_[static_cast<size_t>(direction)].ways; }
  // Unit: bytes a second. Of one long copy; 0: not measured.
  double link_rate(Direction direction) const { return measured_[static_cast<size_t>(direction)].link_rate; }

  // Pieces of one direction whose tables may be read at once.
  static constexpr int kStagings = 2;
  static constexpr int kNoStaging = -1;

 private:
  struct Cell {
    std::atomic<int64_t> pieces{0}, bytes{0}, calls{0};
  };
  struct Staging;

  struct Measured {
    Ways ways;
    double link_rate = 0;
  };

  // What `path` alone would do, without its counts. Two calls may be under way.
  Mover mover_of(Path path);
  void measure();
  void note(const std::string& text);
  void give_up_kernel(const std::string& why);
  void add(Path path, std::span<const Segment> segments, size_t pages, int64_t calls);
  std::string by_engine(Direction direction, std::span<const Segment> segments,
                        std::span<const PageEnds> pages, const Capabilities& usable, StreamHandle stream);
  bool rows_first(Direction direction, std::span<const Copy> copies) const;
  Staging& tables_of(Direction direction, int staging) const;
  // Precondition: `tables` has room for them.
  std::string by_kernel(Direction direction, std::span<const CopyChunk> chunks,
                        std::span<const PageEnds> pages, Staging& tables, StreamHandle stream);
  std::string by_batch(Direction direction, std::span<const Copy> copies, StreamHandle stream,
                       int64_t& calls);
  std::string by_rows(Direction direction, std::span<const PitchedCopy> rows, StreamHandle stream,
                      int64_t& calls);
  std::string single(Direction direction, const Copy& copy, StreamHandle stream);
  Code batch_call(size_t begin, size_t end, SourceOrder order, StreamHandle stream);

  const std::shared_ptr<Device> device_;
  const KernelLauncher launcher_;
  mutable std::mutex mutex_;  // of the next two, which the copying thread alone changes
  Capabilities capabilities_;
  std::string notes_;
  std::atomic<int64_t> failed_launches_{0};
  std::array<Measured, 2> measured_;  // by Direction
  std::array<Cell, kPaths> counts_;
  std::vector<DeviceAddress> dsts_, srcs_;
  std::vector<size_t> sizes_;
  std::array<std::unique_ptr<Staging>, 2 * kStagings> stagings_;
};

}  // namespace flexkv::cuda
