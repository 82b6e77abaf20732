// Classes that own streams and events of a device. Their destructors destroy the stream or event.
#pragma once
#include <memory>
#include <string>

#include "cuda/device.h"
#include "transfer/stream_event.h"

namespace flexkv::cuda {

// A stream that flexkv creates. It does not wait for the legacy null stream, and the legacy null stream does
// not wait for it.
class Stream {
 public:
  // If `urgent` is set, the stream's kernels get multiprocessors before the kernels of other streams. Throws
  // CapacityError if the driver fails.
  explicit Stream(std::shared_ptr<Device> device, bool urgent = false);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }

 private:
  const std::shared_ptr<Device> device_;
  StreamHandle handle_ = nullptr;
};

// A recorded event. A thread that waits for the event sleeps instead of spinning.
class Event : public StreamEvent {
 public:
  // Records the event on `stream`, whose device must be current. Throws CapacityError if the driver fails.
  Event(std::shared_ptr<Device> device, StreamHandle stream);
  ~Event() override;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  std::string make_wait(StreamId stream) override;
  bool reached() override;
  // Whether the work enqueued before the event has ended successfully. Precondition: the device is current.
  bool ended_well() const;
  // Sleeps until the work enqueued before the event has ended. Returns an empty string if the work succeeded,
  // otherwise an error message. In both cases, the work is no longer in progress.
  std::string wait();

 private:
  const std::shared_ptr<Device> device_;
  EventHandle handle_ = nullptr;
};

// Records an event after all work enqueued on the inference engine's `stream` so far. Throws ContractError
// while the stream is being captured into a CUDA graph, because an event that is recorded in a graph has no
// meaning outside the graph. Throws CapacityError if the driver returns an error.
std::shared_ptr<Event> record_engine(const std::shared_ptr<Device>& device, StreamId stream);

}  // namespace flexkv::cuda
