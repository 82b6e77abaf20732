#include "cuda/event.h"

#include "base/error.h"

namespace flexkv::cuda {

Stream::Stream(std::shared_ptr<Device> device, bool urgent) : device_(std::move(device)) {
  const Current current(*device_);
  const Driver& driver = device_->driver();
  int least = 0, greatest = 0;
  Code code = driver.stream_priority_range(&least, &greatest);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuCtxGetStreamPriorityRange"));
  code = driver.stream_create(&handle_, kStreamNonBlocking, urgent ? greatest : least);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuStreamCreateWithPriority"));
}

Stream::~Stream() {
  const QuietCurrent here(*device_);
  device_->driver().stream_destroy(handle_);
}

Event::Event(std::shared_ptr<Device> device, StreamHandle stream) : device_(std::move(device)) {
  const Driver& driver = device_->driver();
  Code code = driver.event_create(&handle_, kEventBlockingSync | kEventDisableTiming);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuEventCreate"));
  code = driver.event_record(handle_, stream);
  if (code == kSuccess) return;
  driver.event_destroy(handle_);
  throw CapacityError(driver.error_text(code, "cuEventRecord"));
}

// An event may be destroyed while a stream still waits for it: the driver keeps the event until the wait has
// ended.
Event::~Event() {
  const QuietCurrent here(*device_);
  device_->driver().event_destroy(handle_);
}

std::string Event::make_wait(StreamId stream) {
  const Driver& driver = device_->driver();
  return driver.failure(driver.stream_wait_event(reinterpret_cast<StreamHandle>(stream), handle_, 0),
                        "cuStreamWaitEvent");
}

bool Event::reached() {
  const QuietCurrent here(*device_);
  return device_->driver().event_query(handle_) != kErrorNotReady;
}

bool Event::ended_well() const { return device_->driver().event_query(handle_) == kSuccess; }

std::string Event::wait() {
  const Driver& driver = device_->driver();
  return driver.failure(driver.event_synchronize(handle_), "cuEventSynchronize");
}

std::shared_ptr<Event> record_engine(const std::shared_ptr<Device>& device, StreamId stream) {
  const Current here(*device);
  const auto handle = reinterpret_cast<StreamHandle>(stream);
  require_no_capture(*device, handle);
  return std::make_shared<Event>(device, handle);
}

}  // namespace flexkv::cuda
