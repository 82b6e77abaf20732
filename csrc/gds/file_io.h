// Moves bytes between one place in a file and memory: POSIX, io_uring, cuFile, or a decorator around one of
// them.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flexkv {

struct IoCall {
  bool write = false;
  int32_t device = 0;  // the disk
  int64_t file = 0;    // number of the file on it
  int64_t offset = 0;
  void* memory = nullptr;
  int64_t bytes = 0;
};

// Where a call would go if it were made, which a caller asks before it chooses a path, or where it went.
enum class IoRoute {
  kDirect,   // straight between disk and memory
  kBounced,  // through another buffer: it works, at the cost of a copy
  kUnknown,  // one of the two; nothing says which
};

struct IoOutcome {
  int64_t bytes = 0;       // moved; a call that moved fewer than it was asked to has failed
  std::string error;       // why it stopped early; empty at the end of the file or device
  bool of_memory = false;  // the error is of the memory's side, its device or driver, and not the disk's
  std::optional<IoRoute> route = {};  // where it went; unset: where route() says
};

class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual std::string name() const = 0;
  // Synchronous; called from several threads at once. Short transfers are finished where they can be.
  virtual IoOutcome transfer(const IoCall& call) = 0;
  // Several calls in any order, perhaps at once: an outcome a call. After one that failed the rest may be
  // left undone.
  virtual void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) {
    for (size_t i = 0; i < calls.size(); ++i) {
      outcomes[i] = transfer(calls[i]);
      if (outcomes[i].bytes != calls[i].bytes) return;
    }
  }
  virtual IoRoute route(const IoCall& call) const = 0;
  // Why no file reaches the registered memory straight; empty where one does, or where nothing is known of
  // one.
  virtual std::string direct_refusal() const { return {}; }
  // Reads into memory that was added, whose outcomes show by which way files go of which that is not known
  // yet. Made or not, nothing else changes by them. They take as long as their disks do.
  virtual std::vector<IoCall> looks(void*, int64_t) const { return {}; }
  // Memory that will be used often. Empty, or why it could not be registered: it works all the same.
  virtual std::string add_memory(void* memory, int64_t bytes) = 0;
  virtual void remove_memory(void* memory) = 0;
};

}  // namespace flexkv
