// Named ranges of a thread's work for a profiler, by NVTX. Off until a library is loaded: a range then is one
// load of a pointer. NVTX itself does nothing where no tool is attached.
#pragma once
#include <atomic>
#include <string>

namespace flexkv::nvtx {

// Of libnvtx3interop and libnvToolsExt alike.
struct Functions {
  int (*push)(const char* name) = nullptr;
  int (*pop)() = nullptr;
};

// Null while ranges are off.
extern std::atomic<const Functions*> functions;

// Turns ranges on, for good: threads may be inside one. Throws ConfigError, with the loader's words, where
// `library` cannot be loaded or lacks a function. A second call with another library changes nothing.
void load(const std::string& library);

// From here to the end of the scope. `name` has to be a literal: a tool may read it later.
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
  const Functions* functions_;  // of the push, so that ranges stay balanced when they are turned on meanwhile
};

}  // namespace flexkv::nvtx
