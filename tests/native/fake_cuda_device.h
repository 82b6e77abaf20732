// The state behind the fake CUDA driver of fake_cuda.h: its streams and settings. Only the fake's own files
// include it.
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

inline constexpr cuda::Code kInvalidValue = 1;
inline constexpr cuda::Code kInvalidDevice = 101;
inline constexpr cuda::Code kIllegalAddress = 700;
inline constexpr cuda::Code kAlreadyRegistered = 712;
inline constexpr cuda::Code kCaptureUnsupported = 900;
inline constexpr cuda::Code kCaptureIsolation = 905;

struct FakeStream {
  std::deque<std::function<void()>> queue;
  bool held = false;
  bool ends = false;
  bool busy = false;
  int device = 0;
  int64_t moving = 0;      // copies and kernels in flight
  int64_t word_waits = 0;  // kernels in flight that wait for a word
  cuda::Code error = cuda::kSuccess;
  std::thread thread;
};

struct FakeCapture {
  FakeStream* stream = nullptr;
  int mode = cuda::kCaptureGlobal;
  std::thread::id thread;
  bool whole = true;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  Settings settings;
  Calls calls;
  std::vector<std::string> violations;
  std::set<FakeStream*> streams;
  std::map<void*, size_t> registered;
  std::array<int64_t, 2> bytes_in_flight{}, kernels_in_flight{};  // [0]: loads, [1]: stores
  int64_t long_stores_in_flight = 0;
  std::map<void*, size_t> allocations;  // declared by a test
  std::map<std::string, std::pair<int64_t, cuda::Code>> refusals;
  std::function<void()> on_free;
  std::map<int, int64_t> primary_contexts;
  std::vector<FakeCapture> captures;
  int64_t registrations_to_refuse = 0;
  int64_t launches_to_fail = 0;
  int64_t fail_in = -1;
  bool break_next = false;
};

World& world();

// The devices of the contexts on this thread's context stack; the current context's device is the last one.
std::vector<int>& contexts();

// This thread's capture mode.
int& own_capture_mode();

// Returns the result of a potentially unsafe call: kSuccess if no capture forbids it. Otherwise invalidates
// the captures that forbid it, and returns CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED. Precondition of
// unsafe_call() and the next five functions: the lock is held.
cuda::Code unsafe_call();
// The result that a call of `function` must return: the error that a test has requested with refuse(),
// otherwise kSuccess.
cuda::Code refusal_of(const std::string& function);
// The capture that this stream is part of; null if there is none.
FakeCapture* capture_of(const FakeStream* stream);
// Records that `rule` was broken if `good` is false.
void require(bool good, const char* rule);
FakeStream* new_stream(bool held, int device);
void push(FakeStream* stream, std::function<void()> work);

// Precondition: the lock is not held.
void end_stream(FakeStream* stream);

inline FakeStream* as_stream(cuda::StreamHandle handle) { return reinterpret_cast<FakeStream*>(handle); }

// The fake driver's functions for memory, which fake_cuda_memory.cpp defines.
cuda::Code host_register(void* memory, size_t bytes, unsigned flags);
cuda::Code host_unregister(void* memory);
cuda::Code host_alloc(void** memory, size_t bytes, unsigned);
cuda::Code host_free(void* memory);
cuda::Code mem_alloc(cuda::DeviceAddress* address, size_t bytes);
cuda::Code mem_free(cuda::DeviceAddress address);
cuda::Code copy_to_device(cuda::DeviceAddress dst, const void* src, size_t bytes, cuda::StreamHandle stream);
cuda::Code copy_to_host(void* dst, cuda::DeviceAddress src, size_t bytes, cuda::StreamHandle stream);
cuda::Code copy_any(cuda::DeviceAddress dst, cuda::DeviceAddress src, size_t bytes,
                    cuda::StreamHandle stream);
cuda::Code batch(cuda::DeviceAddress* dsts, cuda::DeviceAddress* srcs, size_t* sizes, size_t count,
                 cuda::BatchAttributes* attributes, size_t* indices, size_t attribute_count,
                 cuda::StreamHandle stream);
cuda::Code batch_12080(cuda::DeviceAddress* dsts, cuda::DeviceAddress* srcs, size_t* sizes, size_t count,
                       cuda::BatchAttributes* attributes, size_t* indices, size_t attribute_count,
                       size_t* failed, cuda::StreamHandle stream);
cuda::Code memset_bytes(cuda::DeviceAddress address, unsigned char value, size_t bytes,
                        cuda::StreamHandle stream);
cuda::Code pointer_attribute(void* answer, int attribute, cuda::DeviceAddress address);

}  // namespace flexkv::fake_cuda
