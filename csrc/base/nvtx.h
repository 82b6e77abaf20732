// Marks a thread's work as named ranges for a profiler, through NVTX. Ranges are off until load() is called,
// and then cost one pointer load each. NVTX itself does nothing if no tool is attached.
#pragma once
#include <atomic>
#include <string>

namespace flexkv::nvtx {

// libnvtx3interop and libnvToolsExt both have these.
struct Functions {
  int (*push)(const char* name) = nullptr;
  int (*pop)() = nullptr;
};

// Null while ranges are off.
extern std::atomic<const Functions*> functions;

// Turns ranges on for the rest of the process: they cannot be turned off, because threads may be inside one.
// Throws ConfigError, with the loader's message, if `library` cannot be loaded or lacks a function. A second
// call with another library changes nothing.
void load(const std::string& library);

// A range from here to the end of the scope. `name` must be a string literal, because a tool may read it
// later.
class Range {
 public:
  explicit Range(const char* name) : functions_(functions.load(std::memory_order_acquire)) {
    if (functions_ != nullptr) functions_->push(name);
  }
  ~Range() {
    if (functions_ != nullptr) functions_->pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const Functions* functions_;  // those of the push: ranges stay balanced if they are turned on in between
};

}  // namespace flexkv::nvtx
