// The interface of file I/O, which moves bytes between a file and memory. Some implementations use POSIX
// calls, io_uring or cuFile. Others are decorators, which wrap another implementation.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flexkv {

struct IoCall {
  bool write = false;
  int32_t device = 0;  // number that identifies the disk
  int64_t file = 0;    // number that identifies the file on that disk
  int64_t offset = 0;
  void* memory = nullptr;
  int64_t bytes = 0;
};

// The route that a call's bytes take. It is either the route that is expected before the call, or the route
// that was observed after the call.
enum class IoRoute {
  kDirect,   // directly between disk and memory
  kBounced,  // through another buffer, at the cost of a copy
  kUnknown,  // either direct or bounced, but nothing shows which
};

struct IoOutcome {
  int64_t bytes = 0;       // number of bytes moved; a call that moved fewer than requested has failed
  std::string error;       // why the call failed; empty after success or at the end of the file
  bool of_memory = false;  // whether the memory, its device or its driver caused the error
  std::optional<IoRoute> route = {};  // the observed route; if unset, the call took route(call)
};

// What a FileIo needs before its calls can move bytes directly between memory and a disk.
struct Registering {
  bool needed = false;                // whether memory must be added first, with add_memory()
  bool seen_direct = false;           // whether the last observed calls on some file were direct
  std::string refusal;                // why adding memory would not help; empty if it may help
  std::optional<int64_t> most_bytes;  // how many more bytes can be added; unset if that is not known
};

class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual std::string name() const = 0;
  // Makes a call and waits until the call has finished. If the call moves fewer bytes than requested, goes on
  // with the rest if possible. Thread-safe: several threads call it at once.
  virtual IoOutcome transfer(const IoCall& call) = 0;
  // Makes several calls in any order, perhaps at the same time, and sets one outcome per call. After a call
  // has failed, the function may leave out the remaining calls.
  virtual void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) {
    for (size_t i = 0; i < calls.size(); ++i) {
      outcomes[i] = transfer(calls[i]);
      if (outcomes[i].bytes != calls[i].bytes) return;
    }
  }
  // Returns the route that `call` is expected to take.
  virtual IoRoute route(const IoCall& call) const = 0;
  // Says why no file's calls can move bytes directly to registered memory. Returns an empty text if some
  // file's calls can, or if some file's route is unknown.
  virtual std::string direct_refusal() const { return {}; }
  // Returns probing reads into memory that was added with add_memory(). If the caller makes these calls, they
  // show the routes of files whose route is not known yet. The caller may skip them: they change nothing but
  // the content of that memory.
  virtual std::vector<IoCall> looks(void*, int64_t) const { return {}; }
  virtual Registering registering() const { return {}; }
  // Registers memory that will be used often. Returns an error message, or an empty string on success. Calls
  // on memory that is not registered work, too.
  virtual std::string add_memory(void* memory, int64_t bytes) = 0;
  // Ends the registration of memory. If the registration had been refused, forgets the refusal.
  virtual void remove_memory(void* memory) = 0;
};

}  // namespace flexkv
