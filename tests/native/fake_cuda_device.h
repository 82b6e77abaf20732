// What stands behind the fake CUDA driver of fake_cuda.h: its streams and settings. For the files of the fake
// alone.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"

namespace flexkv::fake_cuda {

struct FakeStream {
  std::deque<std::function<void()>> queue;
  bool held = false;
  bool ends = false;
  bool busy = false;
  int device = 0;
  int64_t moving = 0;  // copies and kernels that have not ended
  cuda::Code error = cuda::kSuccess;
  std::thread thread;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  Settings settings;
  Calls calls;
  std::vector<std::string> violations;
  std::set<FakeStream*> streams;
  std::map<void*, size_t> registered;
  int64_t fail_in = -1;
  bool break_next = false;
};

World& world();

// Devices of this thread's contexts, the current one last.
std::vector<int>& contexts();

// Notes a broken rule. Precondition, here and of the next two: the lock is held.
void require(bool good, const char* rule);
FakeStream* new_stream(bool held, int device);
void push(FakeStream* stream, std::function<void()> work);

// Precondition: the lock is not held.
void end_stream(FakeStream* stream);

}  // namespace flexkv::fake_cuda
