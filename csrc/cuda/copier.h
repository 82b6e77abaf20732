// Enqueues planned copies on a stream, by the means that the device and its driver have.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/device.h"

namespace flexkv::cuda {

enum class Direction { kToDevice, kToHost };

struct CopySwitches {
  bool batch = true;   // off: never cuMemcpyBatchAsync, whatever the self-test says
  bool kernel = true;  // off: never the kernel
};

struct PathCount {
  int64_t pieces = 0;
  int64_t bytes = 0;
  int64_t calls = 0;  // driver calls and launches
};

// Made with the device current; used by one thread.
class Copier {
 public:
  // Runs the self-test of batched copies; what fails it is not used, and `notes()` says why.
  Copier(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Copies `segments` of `pages`. `registered`: all host bytes are known to the device, else no kernel.
  // `staging` names the kernel's tables, of which a direction may have kStagings in use. Empty, or why it
  // failed: then some copies may be under way all the same, and only an event after them says when they have
  // ended.
  std::string enqueue(Direction direction, std::span<const Segment> segments, std::span<const PageEnds> pages,
                      bool registered, int staging, StreamHandle stream);

  const Capabilities& capabilities() const { return capabilities_; }
  // What is not used and why, in words; empty when everything is.
  const std::string& notes() const { return notes_; }
  PathCount count(Path path) const;

  // Pieces of one direction whose tables may be read at once.
  static constexpr int kStagings = 2;

 private:
  struct Cell {
    std::atomic<int64_t> pieces{0}, bytes{0}, calls{0};
  };
  struct Staging;

  std::string self_test();
  std::string by_kernel(Direction direction, std::span<const Segment> segments,
                        std::span<const PageEnds> pages, int staging, StreamHandle stream);
  std::string by_batch(Direction direction, std::span<const Copy> copies, StreamHandle stream,
                       int64_t& calls);
  std::string by_rows(Direction direction, std::span<const Copy> copies, StreamHandle stream, int64_t& calls);
  std::string single(Direction direction, const Copy& copy, StreamHandle stream);
  Code batch_call(size_t begin, size_t end, SourceOrder order, StreamHandle stream);

  const std::shared_ptr<Device> device_;
  const KernelLauncher launcher_;
  Capabilities capabilities_;
  std::string notes_;
  std::array<Cell, kPaths> counts_;
  std::vector<DeviceAddress> dsts_, srcs_;
  std::vector<size_t> sizes_;
  std::array<std::unique_ptr<Staging>, 2 * kStagings> stagings_;
};

}  // namespace flexkv::cuda
