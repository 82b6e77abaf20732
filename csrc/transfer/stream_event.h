// A point in the work of a device stream, for which other streams can wait.
#pragma once
#include <cstdint>
#include <string>

namespace flexkv {

// A device stream of the inference engine: its cudaStream_t as an integer. 0 is CUDA's legacy default stream,
// which torch uses by default; it is treated like any other stream.
using StreamId = uintptr_t;

// A StreamEvent is passed to other code only after it has been recorded, because a wait for an event that was
// never recorded would return at once.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  // Makes `stream` wait: work that is enqueued on `stream` after this call starts only when this point has
  // been reached. Returns an error message, or an empty string on success.
  virtual std::string make_wait(StreamId stream) = 0;
  // Whether this point has been reached. Does not wait. Also returns true if this cannot be determined.
  virtual bool reached() = 0;
};

}  // namespace flexkv
