// Classes that own a device's streams and events, and destroy them.
#pragma once
#include <memory>
#include <string>

#include "cuda/device.h"
#include "transfer/stream_event.h"

namespace flexkv::cuda {

// A stream that flexkv creates. This stream and the legacy null stream do not wait for each other.
class Stream {
 public:
  // If `urgent`, the stream's kernels get multiprocessors before those of other streams. Throws
  // CapacityError.
  explicit Stream(std::shared_ptr<Device> device, bool urgent = false);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }

 private:
  const std::shared_ptr<Device> device_;
  StreamHandle handle_ = nullptr;
};

// A recorded event. A thread that waits for it sleeps instead of spinning.
class Event : public StreamEvent {
 public:
  // Records the event on `stream`, whose device must be current. Throws CapacityError.
  Event(std::shared_ptr<Device> device, StreamHandle stream);
  ~Event() override;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  std::string make_wait(StreamId stream) override;
  bool reached() override;
  // Whether the work enqueued before the event has ended successfully. Precondition: the device is current.
  bool ended_well() const;
  // Sleeps until the work enqueued before the event has ended. Returns an empty string if the work succeeded,
  // otherwise how it failed. In both cases the work is no longer in progress.
  std::string wait();

 private:
  const std::shared_ptr<Device> device_;
  EventHandle handle_ = nullptr;
};

// Records an event after all work enqueued on the engine's `stream` so far. Throws ContractError while the
// stream is being captured into a graph, because an event that is recorded in a graph has no meaning outside
// the graph. Throws CapacityError if the driver returns an error.
std::shared_ptr<Event> record_engine(const std::shared_ptr<Device>& device, StreamId stream);

}  // namespace flexkv::cuda
