// Shows a thread's work as named ranges in a profiler, by means of NVTX. Ranges are off until load() is
// called. While ranges are off, each range costs only the load of a pointer. NVTX itself does nothing if no
// tool is attached.
#pragma once
#include <atomic>
#include <string>

namespace flexkv::nvtx {

// The NVTX functions that ranges call. The libraries libnvtx3interop and libnvToolsExt both have them.
struct Functions {
  int (*push)(const char* name) = nullptr;
  int (*pop)() = nullptr;
};

// The table of NVTX's functions; null while ranges are off.
extern std::atomic<const Functions*> functions;

// Turns ranges on until the process ends. They cannot be turned off, because a thread may be inside a range.
// Throws ConfigError, with the reason, if `library` cannot be loaded or does not have one of the functions.
// After the first successful call, further calls change nothing, even with a different library.
void load(const std::string& library);

// A profiler range that lasts as long as the object. `name` must be a string literal, because a profiler may
// read the name later.
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
  const Functions* functions_;  // read only in the constructor, so that every pop matches a push
};

}  // namespace flexkv::nvtx
