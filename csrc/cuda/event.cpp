#include "cuda/event.h"

#include "base/error.h"

namespace flexkv::cuda {

Stream::Stream(std::shared_ptr<Device> device) : device_(std::move(device)) {
  const Current current(*device_);
  const Driver& driver = device_->driver();
  const Code code = driver.stream_create(&handle_, kStreamNonBlocking);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuStreamCreate"));
}

Stream::~Stream() {
  const QuietCurrent here(*device_);
  device_->driver().stream_destroy(handle_);
}

Event::Event(std::shared_ptr<Device> device, StreamHandle stream, bool timed) : device_(std::move(device)) {
  const Driver& driver = device_->driver();
  Code code = driver.event_create(&handle_, kEventBlockingSync | (timed ? 0 : kEventDisableTiming));
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuEventCreate"));
  code = driver.event_record(handle_, stream);
  if (code == kSuccess) return;
  driver.event_destroy(handle_);
  throw CapacityError(driver.error_text(code, "cuEventRecord"));
}

// Destroying an event that a stream still waits for is allowed: the driver keeps it until then.
Event::~Event() {
  const QuietCurrent here(*device_);
  device_->driver().event_destroy(handle_);
}

std::string Event::make_wait(StreamId stream) {
  const Driver& driver = device_->driver();
  const Code code = driver.stream_wait_event(reinterpret_cast<StreamHandle>(stream), handle_, 0);
  return code == kSuccess ? std::string() : driver.error_text(code, "cuStreamWaitEvent");
}

bool Event::reached() {
  const QuietCurrent here(*device_);
  return device_->driver().event_query(handle_) != kErrorNotReady;
}

std::string Event::wait() {
  const Driver& driver = device_->driver();
  const Code code = driver.event_synchronize(handle_);
  return code == kSuccess ? std::string() : driver.error_text(code, "cuEventSynchronize");
}

double Event::seconds_after(const Event& earlier) const {
  const Driver& driver = device_->driver();
  float milliseconds = 0;
  const Code code = driver.event_elapsed(&milliseconds, earlier.handle_, handle_);
  if (code != kSuccess) throw CapacityError(driver.error_text(code, "cuEventElapsedTime"));
  return static_cast<double>(milliseconds) * 1e-3;
}

std::shared_ptr<Event> record_engine(const std::shared_ptr<Device>& device, StreamId stream) {
  const Current here(*device);
  const auto handle = reinterpret_cast<StreamHandle>(stream);
  require_no_capture(*device, handle);
  return std::make_shared<Event>(device, handle);
}

}  // namespace flexkv::cuda
