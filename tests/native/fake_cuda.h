// A FAKE CUDA driver for tests: host memory stands in for device memory, each stream is a thread that works
// through its queue, and events behave as real ones do (waiting for one that was never recorded waits for
// nothing; a wait is for what was recorded at the time of the call). Contexts are counted per device and
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
  bool kernel_corrupts = false;  // a kernel that changes one
  bool words_refused = false;    // streams that refuse to write a word for a mark
  bool words_lost = false;       // streams that accept such a write and never make it
};

struct Calls {
  int64_t single = 0, batch = 0, kernel = 0;
  int64_t largest_batch = 0;
  int64_t bytes = 0;       // enqueued
  int64_t queries = 0;     // looks at a stream or an event, by the driver
  int64_t words = 0;       // words that streams have written
  int64_t word_waits = 0;  // kernels that wait for a word
  // For loads and for stores: the most bytes under way at once by the copy engine, the longest copy, the
  // largest batch in bytes, the most multiprocessors given to the kernel, and the most kernels under way at
  // once.
  std::array<int64_t, 2> peak_bytes{}, longest_copy{}, most_batch_bytes{}, multiprocessors{}, peak_kernels{};
  // Stores of more than kLongStoreCopy that were under way by the copy engine at once: behind two of them a
  // small copy of another stream was seen to wait for 10 to 370 ms, and once for 2 s.
  int64_t peak_long_stores = 0;
  std::vector<int> priorities;      // of the streams that were made, 0 the least
  std::vector<int32_t> stage_ends;  // in chunks, of the last kernel that counted several stages
  int64_t records = 0;
  int64_t waits = 0;
  std::map<int, int64_t> bytes_of_device;  // enqueued, by the device of the stream
  std::vector<cuda::SourceOrder> orders;
  std::vector<size_t> registered_bytes;  // by each call that registered, in order
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
// The driver's rules that were broken, in words; empty in a good test.
std::vector<std::string> violations();
// Whether a rule that contains `words` was broken; forgets those that were. For controls.
bool take_violation(const std::string& words);
// The bytes of host memory that are registered now, by address.
std::map<void*, size_t> registered();

// The device that is current for this thread; -1: none.
int current_device();
// What the runtime's cudaSetDevice does since CUDA 12: creates the device's primary context if there is none,
// and makes it current. For the engine's threads, and as a control.
void set_device(int device);
// References to primary contexts that exist, by device.
std::map<int, int64_t> primary_contexts();

// The engine captures a graph on its stream, from this thread, in one of the modes cuda::kCapture...;
// end_capture() returns whether the graph is whole.
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
// From now on, each free calls this first.
void on_free(std::function<void()> call);
// Declares that these bytes of a test's memory are one allocation: no copy may have bytes of two.
void add_allocation(void* memory, size_t bytes);

// The n-th copy call from now (0: the next) fails at once; -1: none.
void fail_copy(int64_t nth);
// While `breaks`, copies that are enqueued do not move, and make the next host wait on their stream report an
// error.
void break_stream(bool breaks);
// Holds or releases all streams that exist.
void hold_all(bool held);

// Limits that the fake enforces, from the sources that the product names for them.
inline constexpr size_t kMostBatchCopies = 4096;
inline constexpr int kMostMultiprocessors = 2;
inline constexpr int64_t kLongStoreCopy = 64 << 10;

// The engine's side: a stream, and work on it.
uintptr_t make_stream(bool held, int device = 0);
void enqueue(uintptr_t stream, std::function<void()> work);
void release_stream(uintptr_t stream);
// Sleeps until the stream has worked through its queue; settle(): until all have.
void drain(uintptr_t stream);
void settle();
void destroy_stream(uintptr_t stream);

}  // namespace flexkv::fake_cuda
