// CUDA's rules for the threads of a process: contexts and graph capture.
#include <utility>

#include "fake_cuda_device.h"

namespace flexkv::fake_cuda {

std::vector<int>& contexts() {
  thread_local std::vector<int> devices;
  return devices;
}

int& own_capture_mode() {
  thread_local int mode = cuda::kCaptureGlobal;
  return mode;
}

FakeCapture* capture_of(const FakeStream* stream) {
  for (FakeCapture& capture : world().captures) {
    if (capture.stream == stream) return &capture;
  }
  return nullptr;
}

// The rules are those in the documentation of cudaThreadExchangeStreamCaptureMode. That page mentions only
// cudaMalloc as a potentially unsafe call. The fake treats as unsafe all calls that are not enqueued on a
// stream, and copies, too (vllm-project/vllm#48053).
cuda::Code unsafe_call() {
  cuda::Code code = cuda::kSuccess;
  for (FakeCapture& capture : world().captures) {
    const bool own = capture.thread == std::this_thread::get_id();
    const bool forbidden =
        own ? capture.mode != cuda::kCaptureRelaxed && own_capture_mode() != cuda::kCaptureRelaxed
            : capture.mode == cuda::kCaptureGlobal && own_capture_mode() == cuda::kCaptureGlobal;
    if (!forbidden) continue;
    capture.whole = false;
    code = kCaptureUnsupported;
  }
  return code;
}

int current_device() { return contexts().empty() ? -1 : contexts().back(); }

void set_device(int device) {
  const std::lock_guard lock(world().mutex);
  const bool made = world().primary_contexts[device] > 0;
  require(made, "a context on a device that nobody asked for");
  // This reference is never released: the CUDA runtime does not release its reference either.
  if (!made) ++world().primary_contexts[device];
  if (contexts().empty()) contexts().push_back(device);
  contexts().back() = device;
}

std::map<int, int64_t> primary_contexts() {
  const std::lock_guard lock(world().mutex);
  return world().primary_contexts;
}

void begin_capture(uintptr_t stream, int mode) {
  const std::lock_guard lock(world().mutex);
  world().captures.push_back({reinterpret_cast<FakeStream*>(stream), mode, std::this_thread::get_id(), true});
}

bool end_capture(uintptr_t stream) {
  const std::lock_guard lock(world().mutex);
  const FakeCapture* capture = capture_of(reinterpret_cast<FakeStream*>(stream));
  const bool whole = capture != nullptr && capture->whole;
  std::erase_if(world().captures, [&](const FakeCapture& one) { return &one == capture; });
  return whole;
}

int capture_mode() { return own_capture_mode(); }

cuda::Code refusal_of(const std::string& function) {
  const auto found = world().refusals.find(function);
  if (found == world().refusals.end() || found->second.first == 0) return cuda::kSuccess;
  if (found->second.first != kAlways) --found->second.first;
  return found->second.second;
}

void refuse(const std::string& function, int64_t count, cuda::Code code) {
  const std::lock_guard lock(world().mutex);
  world().refusals[function] = {count, code};
}

void on_free(std::function<void()> call) {
  const std::lock_guard lock(world().mutex);
  world().on_free = std::move(call);
}

void add_allocation(void* memory, size_t bytes) {
  const std::lock_guard lock(world().mutex);
  world().allocations[memory] = bytes;
}

void refuse_registrations(int64_t count) {
  const std::lock_guard lock(world().mutex);
  world().registrations_to_refuse = count;
}

void fail_launches(int64_t count) {
  const std::lock_guard lock(world().mutex);
  world().launches_to_fail = count;
}

}  // namespace flexkv::fake_cuda
