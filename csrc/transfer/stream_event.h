// A point in a device stream's work that other streams can wait for.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

// A device stream as the engine names it: cudaStream_t as an integer. 0 is the legacy null stream (torch's
// default), which is a stream like any other here.
using StreamId = uintptr_t;

// Recorded before anyone sees it: waiting for an event that was never recorded waits for nothing.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  // Makes work that is enqueued on `stream` from now on start after this point is reached. Empty, or why that
  // failed.
  virtual std::string make_wait(StreamId stream) = 0;
  // Whether this point has been reached, without waiting. Also true if that cannot be determined.
  virtual bool reached() = 0;
};

}  // namespace flexkv
