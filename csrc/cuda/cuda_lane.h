// Moves pages of H2D and D2H ops between one GPU and the host pool, on own streams.
//
// One thread issues: it takes items while a direction has fewer than kItemsInFlight under way, and expedited
// ones however many there are; it makes the direction's stream wait for the engine's, enqueues the copies and
// an event. One thread for each direction
// sleeps on those events in order and ends the items. Nothing synchronises with the device as a whole.
#pragma once
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/copier.h"
#include "cuda/device.h"
#include "transfer/digest_crew.h"
#include "transfer/lane.h"

namespace flexkv::cuda {

// Unit: items in their turn, of at most piece_bytes(). Two keep the link busy while the next is prepared;
// more would only make one that is urgent wait longer in its direction. Expedited items come on top: they may
// wait for the engine, so that these two may stand still as well.
inline constexpr int kItemsInFlight = Copier::kStagings;

class CudaLane : public Lane {
 public:
  // Makes streams and runs the self-tests. Both directions' digests are the crew's. Throws CapacityError.
  CudaLane(std::shared_ptr<Device> device, KernelLauncher launcher, const CopySwitches& switches,
           std::unique_ptr<DigestCrew> digests = std::make_unique<DigestCrew>());
  ~CudaLane() override;

  const char* name() const override { return name_.c_str(); }
  KindSet kinds() const override { return kind_bit(OpKind::kH2D) | kind_bit(OpKind::kD2H); }
  int32_t concurrency() const override { return 2 * kItemsInFlight; }
  // Less than kSubBatchBytes where the link was measured, and that takes too long on it.
  int64_t piece_bytes(OpKind kind) const override;
  void start(std::shared_ptr<WorkSource> source, int32_t lane) override;
  void wake() override;
  bool needs_stream() const override { return true; }
  std::shared_ptr<StreamEvent> record(StreamId stream) override;
  void make_wait(StreamEvent& event, StreamId stream) override;
  void join() override;
  void abandon() override;

  const Copier& copier() const;

 private:
  struct Shared;  // outlives the lane when a device hangs

  const std::shared_ptr<Device> device_;
  const std::string name_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace flexkv::cuda
