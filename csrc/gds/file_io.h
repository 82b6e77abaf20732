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
  int64_t file = 0;    // number of the file on that disk
  int64_t offset = 0;
  void* memory = nullptr;
  int64_t bytes = 0;
};

// The route of a call's bytes, either expected, when a caller chooses a path, or observed afterwards.
enum class IoRoute {
  kDirect,   // directly between disk and memory
  kBounced,  // through another buffer, at the cost of a copy
  kUnknown,  // one of the two, but nothing shows which
};

struct IoOutcome {
  int64_t bytes = 0;                  // bytes moved; a call that moved fewer than requested has failed
  std::string error;                  // why it stopped early; empty at the end of the file or device
  bool of_memory = false;             // the memory, its device or driver caused the error, not the disk
  std::optional<IoRoute> route = {};  // the observed route; unset: the one that route() expects
};

// What memory needs for calls to go directly between it and a disk.
struct Registering {
  bool needed = false;                // calls reach only added memory directly; if false, any memory
  bool seen_direct = false;           // the last observed calls on some file went directly to added memory
  std::string refusal;                // why adding memory would not help; empty if it may
  std::optional<int64_t> most_bytes;  // how much more can be added; unset: not known
};

class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual std::string name() const = 0;
  // Synchronous; several threads call it at once. Continues short transfers if it can.
  virtual IoOutcome transfer(const IoCall& call) = 0;
  // Makes several calls in any order, perhaps at once, and sets one outcome per call. After one that failed,
  // the rest may be left undone.
  virtual void transfer_all(std::span<const IoCall> calls, std::span<IoOutcome> outcomes) {
    for (size_t i = 0; i < calls.size(); ++i) {
      outcomes[i] = transfer(calls[i]);
      if (outcomes[i].bytes != calls[i].bytes) return;
    }
  }
  virtual IoRoute route(const IoCall& call) const = 0;
  // Why no file reaches registered memory directly; empty if one does, or if the route of one is unknown.
  virtual std::string direct_refusal() const { return {}; }
  // Returns reads into added memory whose outcomes would show the routes of files that are not known yet. The
  // caller may skip them: they change nothing but the content of that memory. Each takes as long as its disk
  // does.
  virtual std::vector<IoCall> looks(void*, int64_t) const { return {}; }
  virtual Registering registering() const { return {}; }
  // Registers memory that will be used often. Returns an error, empty on success; calls on unregistered
  // memory still work.
  virtual std::string add_memory(void* memory, int64_t bytes) = 0;
  // Ends the registration, or forgets that it was refused.
  virtual void remove_memory(void* memory) = 0;
};

}  // namespace flexkv
