// A buffer that never shrinks, and that frees memory only in its destructor.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace flexkv {

// When the buffer grows, its old memory is not freed before the buffer's destructor runs, because freeing
// device memory waits for all work on the device, including the work of other transfers and of the inference
// engine. `Memory` has allocate(void**, size_t), which returns an error message or an empty string, and
// release(void*).
template <typename Memory>
class GrowingBuffer {
 public:
  explicit GrowingBuffer(Memory source = {}) : source_(source) {}
  ~GrowingBuffer() {
    for (void* memory : allocated_) source_.release(memory);
  }
  GrowingBuffer(const GrowingBuffer&) = delete;
  GrowingBuffer& operator=(const GrowingBuffer&) = delete;
  // Makes the buffer at least `bytes` large. If the buffer grows, its content is lost. Returns an empty
  // string on success. If there is not enough memory, returns an error message and leaves the buffer
  // unchanged.
  std::string reserve(size_t bytes) {
    if (bytes <= bytes_) return {};
    // The size at least doubles, so that all old memory together is smaller than the memory in use.
    const size_t grown = std::max(bytes, 2 * bytes_);
    void* memory = nullptr;
    std::string error = source_.allocate(&memory, grown);
    if (!error.empty()) return error;
    allocated_.push_back(memory);
    memory_ = memory;
    bytes_ = grown;
    return {};
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  Memory source_;
  std::vector<void*> allocated_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace flexkv
