// A point in a device stream's work, for which other streams can wait.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

// A device stream as the engine names it: cudaStream_t as an integer. 0 is the legacy null stream (torch's
// default), which is a stream like any other here.
using StreamId = uintptr_t;

// An event is recorded before other code sees it, because a wait for an event that was never recorded returns
// at once.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  // Makes work that is enqueued on `stream` from now on start after this point is reached. Returns an error;
  // empty on success.
  virtual std::string make_wait(StreamId stream) = 0;
  // Whether this point has been reached; does not wait. Also true if that cannot be determined.
  virtual bool reached() = 0;
};

}  // namespace flexkv
