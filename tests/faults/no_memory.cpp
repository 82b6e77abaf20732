// A library to preload into a process. It makes aligned allocations fail in the thread whose name is in
// NO_MEMORY_THREAD. fail_allocations() sets how many of the next aligned allocations fail.
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int> left{0};
std::atomic<int> failed{0};

}  // namespace

extern "C" {

void fail_allocations(int count) { left = count; }
int failed_allocations() { return failed; }

void* aligned_alloc(size_t boundary, size_t bytes) noexcept {
  const char* named = getenv("NO_MEMORY_THREAD");
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  if (left > 0 && named != nullptr && strcmp(name, named) == 0) {
    --left;
    ++failed;
    return nullptr;
  }
  void* memory = nullptr;
  return posix_memalign(&memory, boundary, bytes) == 0 ? memory : nullptr;
}

}  // extern "C"
