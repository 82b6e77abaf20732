// A FAKE CUDA driver for tests: host memory stands for device memory, each stream is a thread that works
// through its queue, and events mean what the real ones mean (waiting for one that was never recorded waits
// for nothing; what is waited for is what was recorded at the time of the call). Contexts are counted a
// device and current a thread, and graph capture forbids calls by CUDA's rules. It checks the rules of the
// calls it knows, and fails on request. It shows ordering and bookkeeping; it says nothing about speed, nor
// about a real driver's bugs.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda/copy_job.h"
#include "cuda/copy_plan.h"
#include "cuda/driver.h"

namespace flexkv::fake_cuda {

struct Settings {
  int version = 13000;
  int devices = 1;
  int max_pitch = 1 << 30;
  bool batch_corrupts = false;   // a driver whose batched copies lose a byte
  bool kernel_corrupts = false;  // a kernel that changes one
  bool words_refused = false;    // streams that write no word for a mark
  bool words_lost = false;       // streams that take such a write, and never make it
};

struct Calls {
  int64_t single = 0, pitched = 0, batch = 0, kernel = 0;
  int64_t largest_batch = 0;
  int64_t bytes = 0;    // enqueued
  int64_t queries = 0;  // looks at a stream or an event, by the driver
  int64_t words = 0;    // that streams have written
  // For loads, and for stores: by the copy engine at most under way at once, the longest copy, the
  // longest batch, and what the kernel was given.
  std::array<int64_t, 2> peak_bytes{}, longest_copy{}, most_batch_bytes{}, multiprocessors{}, peak_kernels{};
  // Stores of more than kLongStoreCopy that were under way by the copy engine at once: behind two of them a
  // small copy of another stream was seen to wait for 10 to 370 ms, and once for 2 s.
  int64_t peak_long_stores = 0;
  std::vector<int> priorities;  // of the streams made, 0 the least
  int64_t records = 0;
  int64_t waits = 0;
  std::map<int, int64_t> bytes_of_device;  // enqueued, by the device of the stream
  std::vector<cuda::SourceOrder> orders;
  std::vector<size_t> registered_bytes;  // of each call that registered, in order
  int64_t refused_registrations = 0;
  int64_t unregistered = 0;
};

// Drops all state. No stream may exist.
void reset(const Settings& settings = {});
cuda::FindFunction finder();
cuda::KernelLauncher kernel_launcher();
Calls calls();
// Rules of the driver that were broken, in words; empty in a good test.
std::vector<std::string> violations();
// Whether a rule was broken since the last call; it is forgotten. For controls.
bool take_violation(const std::string& words);
// Host memory that is registered now, by its address: bytes.
std::map<void*, size_t> registered();

// The device that is current for this thread; -1: none.
int current_device();
// What the runtime's cudaSetDevice does since CUDA 12: makes the device's primary context, where there is
// none, and that current. For the engine's threads, and as a control.
void set_device(int device);
// References to primary contexts that exist, by device.
std::map<int, int64_t> primary_contexts();

// The engine captures a graph on its stream, from this thread, in one of cuda::kCapture...; end_capture says
// whether it came out whole.
void begin_capture(uintptr_t stream, int mode = cuda::kCaptureGlobal);
bool end_capture(uintptr_t stream);
// This thread's mode.
int capture_mode();

// The next `count` registrations of host memory are refused.
void refuse_registrations(int64_t count);
// The next `count` kernels are not launched; kAlways: none from now on.
inline constexpr int64_t kAlways = INT64_MAX;
void fail_launches(int64_t count);

// The next `count` calls of this function of the driver fail with `code`: of cuCtxPushCurrent,
// cuMemHostAlloc, cuEventRecord and cuStreamIsCapturing.
inline constexpr cuda::Code kOutOfMemory = 2;
void refuse(const std::string& function, int64_t count, cuda::Code code = kOutOfMemory);
// Called by each free from now on, before it.
void on_free(std::function<void()> call);
// These bytes of a test's memory were allocated as one: a copy may not have bytes of two such.
void add_allocation(void* memory, size_t bytes);

// The n-th copy call from now (0: the next) fails at once; -1: none.
void fail_copy(int64_t nth);
// Whether copies enqueued from now on do not move and make the next host wait on their stream report an
// error.
void break_stream(bool breaks);
// Stops or lets go all streams that exist.
void hold_all(bool held);

// What the fake holds against a caller, from the sources that the product names for them.
inline constexpr size_t kMostBatchCopies = 4096;
inline constexpr int kMostMultiprocessors = 2;
inline constexpr int64_t kLongStoreCopy = 32 << 10;

// The engine's side: a stream, and work on it.
uintptr_t make_stream(bool held, int device = 0);
void enqueue(uintptr_t stream, std::function<void()> work);
void release_stream(uintptr_t stream);
// Sleeps until the stream has worked off its queue; settle: until all have.
void drain(uintptr_t stream);
void settle();
void destroy_stream(uintptr_t stream);

}  // namespace flexkv::fake_cuda
