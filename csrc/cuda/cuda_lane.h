// Moves pages of H2D and D2H ops between one GPU and the host pool, with a thread and streams for each
// direction (lane_direction.h). No call synchronises with the whole device.
#pragma once
#include <array>
#include <climits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/copier.h"
#include "cuda/copy_ways.h"
#include "cuda/device.h"
#include "transfer/digest_crew.h"
#include "transfer/lane.h"

namespace flexkv::cuda {

class CudaLane : public Lane {
 public:
  // Makes the streams and runs the self-tests of the copy paths. The crew `digests` writes the digests of
  // pages that are stored, and checks the digests of pages that are loaded. Throws CapacityError if the
  // driver fails.
  CudaLane(std::shared_ptr<Device> device, CopyKernels kernels, const CopySwitches& switches,
           std::unique_ptr<DigestCrew> digests = std::make_unique<DigestCrew>());
  ~CudaLane() override;

  const char* name() const override { return name_.c_str(); }
  KindSet kinds() const override { return kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H); }
  // There is no limit. So stuck items of one direction never cause the opposite direction to be taken down,
  // whose items may still move.
  int32_t concurrency() const override { return INT32_MAX; }
  // Items are large enough that the thread can prepare the next copies early. A more urgent op waits for two
  // items of this size, about 3 ms.
  int64_t item_bytes() const override { return kLaunchBytes; }
  bool takes_all_stages() const override { return true; }
  bool kinds_are_apart() const override { return true; }
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  void wake(OpKind kind) override;
  bool needs_stream() const override { return true; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override;
  std::string make_wait(StreamEvent& event, StreamId stream) override;
  void join() override;
  void abandon() override;

  const Copier& copier() const;

 private:
  struct Shared;  // the threads own it, too: it outlives the lane if a device hangs

  void end_threads();

  const std::shared_ptr<Device> device_;
  const std::string name_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace flexkv::cuda
