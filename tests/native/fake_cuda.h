// A FAKE CUDA driver for tests: host memory stands in for device memory, each stream is a thread that works
// through its queue, and events behave as real ones do (a wait for an event that was never recorded returns
// at once; a wait covers what was recorded at the time of the call). Contexts are counted per device and
// current per thread, and graph capture forbids calls by CUDA's rules. It checks the rules of the calls it
// knows, and fails on request. It shows ordering and bookkeeping, but nothing about speed or about a real
// driver's bugs.
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
  bool batch_corrupts = false;   // a driver whose batched copies lose a byte
  bool kernel_corrupts = false;  // a kernel that changes a byte
  bool words_refused = false;    // streams that refuse to write a word for a mark
  bool words_lost = false;       // streams that accept such a write and never make it
};

struct Calls {
  int64_t single = 0, batch = 0, kernel = 0;
  int64_t largest_batch = 0;
  int64_t bytes = 0;       // enqueued
  int64_t queries = 0;     // looks at a stream or an event, by the driver
  int64_t words = 0;       // number of words that streams have written
  int64_t word_waits = 0;  // number of kernels that wait for a word
  // For loads and for stores: the most bytes under way at once by the copy engine, the longest copy, the
  // largest batch in bytes, the most multiprocessors given to the kernel, and the most kernels under way at
  // once.
  std::array<int64_t, 2> peak_bytes{}, longest_copy{}, most_batch_bytes{}, multiprocessors{}, peak_kernels{};
  // The most stores of more than kLongStoreCopy that the copy engine had under way at once: behind two of
  // them, a small copy of another stream was seen to wait for 10 to 370 ms, and once for 2 s.
  int64_t peak_long_stores = 0;
  std::vector<int> priorities;      // of the streams that were created; 0 is the lowest
  std::vector<int32_t> stage_ends;  // in chunks, for the last kernel that counted several stages
  int64_t records = 0;
  int64_t waits = 0;
  std::map<int, int64_t> bytes_of_device;  // number enqueued, by the device of the stream
  std::vector<cuda::SourceOrder> orders;
  std::vector<size_t> registered_bytes;  // of each registering call, in order
  int64_t refused_registrations = 0;
  int64_t unregistered = 0;
};

// Drops all state. No stream may exist.
void reset(const Settings& settings = {});
cuda::FindFunction finder();
cuda::CopyKernels copy_kernels();
// Runs the copy kernel on the CPU, thread after thread from last to first.
void run_on_cpu(const cuda::CopyJob& job, int32_t warps);
Calls calls();
// Descriptions of the driver's rules that were broken; empty in a good test.
std::vector<std::string> violations();
// For controls: whether a broken rule's description contains `words`; then forgets all broken rules.
bool take_violation(const std::string& words);
// The bytes of host memory that are registered now, by address.
std::map<void*, size_t> registered();

// The current device of this thread; -1: none.
int current_device();
// What the runtime's cudaSetDevice does since CUDA 12: creates the device's primary context if there is none,
// and makes it current. For the engine's threads, and as a control.
void set_device(int device);
// References to primary contexts that exist, by device.
std::map<int, int64_t> primary_contexts();

// The engine captures a graph on its stream, from this thread, in one of the modes cuda::kCapture...;
// end_capture() returns whether the graph is complete.
void begin_capture(uintptr_t stream, int mode = cuda::kCaptureGlobal);
bool end_capture(uintptr_t stream);
// This thread's mode.
int capture_mode();

// The next `count` registrations of host memory are refused.
void refuse_registrations(int64_t count);
// The next `count` kernels are not launched; kAlways: none from now on.
inline constexpr int64_t kAlways = INT64_MAX;
void fail_launches(int64_t count);

// The next `count` calls of this function of the driver fail with `code`: one of cuCtxPushCurrent,
// cuMemHostAlloc (with cuMemAlloc), cuEventRecord, cuStreamWriteValue32 and cuStreamIsCapturing; or launches
// of "the kernel that waits" for a word.
inline constexpr cuda::Code kOutOfMemory = 2;
void refuse(const std::string& function, int64_t count, cuda::Code code = kOutOfMemory);
// From now on, each call that frees memory calls this first.
void on_free(std::function<void()> call);
// Declares that these bytes of a test's memory are one allocation: no copy may span two allocations.
void add_allocation(void* memory, size_t bytes);

// The n-th copy call from now (0: the next) fails at once; -1: none.
void fail_copy(int64_t nth);
// While `breaks`, copies that are enqueued do not move, and make the next host wait on their stream report an
// error.
void break_stream(bool breaks);
// Holds or releases all streams that exist.
void hold_all(bool held);

// Limits that the fake enforces; the product names the sources of these numbers.
inline constexpr size_t kMostBatchCopies = 4096;
inline constexpr int kMostMultiprocessors = 2;
inline constexpr int64_t kLongStoreCopy = 64 << 10;

// The engine's side: a stream, and work on it.
uintptr_t make_stream(bool held, int device = 0);
void enqueue(uintptr_t stream, std::function<void()> work);
void release_stream(uintptr_t stream);
// Sleeps until the stream has worked through its queue; settle() sleeps until all streams have.
void drain(uintptr_t stream);
void settle();
void destroy_stream(uintptr_t stream);

}  // namespace flexkv::fake_cuda
