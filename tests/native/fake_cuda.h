// A FAKE CUDA driver for tests. Its device memory is host memory, and each of its streams is a thread that
// executes a queue of work. Events behave as in the real driver: a wait for an event that was never recorded
// returns at once. A wait covers only the work before the event's latest record at the time of the call.
// References to contexts are counted per device, and each thread has its own current context. Graph capture
// forbids calls by CUDA's rules. The fake checks that its callers keep the driver's rules, and fails calls on
// request. Tests with it verify order and bookkeeping, but neither speed nor the behaviour of bugs in a real
// driver.
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
  bool batch_corrupts = false;   // batched copies lose a byte
  bool kernel_corrupts = false;  // the copy kernel changes a byte
  bool words_refused = false;    // streams refuse to write a word
  bool words_lost = false;       // streams accept the write of a word but never execute it
};

struct Calls {
  int64_t single = 0, batch = 0, kernel = 0;
  int64_t largest_batch = 0;
  int64_t bytes = 0;       // total size of all enqueued copies
  int64_t queries = 0;     // calls that query a stream or an event
  int64_t words = 0;       // number of words that streams have written
  int64_t word_waits = 0;  // number of enqueued kernels that wait for a word
  // Maxima, separately for loads (index 0) and stores (index 1). They count the bytes that the copy engine
  // had in flight at once, the bytes of one copy and of one batch, the multiprocessors that a kernel got, and
  // the kernels in flight at once.
  std::array<int64_t, 2> peak_bytes{}, longest_copy{}, most_batch_bytes{}, multiprocessors{}, peak_kernels{};
  // The maximum number of stores of more than kLongStoreCopy bytes that the copy engine had in flight at
  // once. On a real GPU, a small copy on another stream waited 10 to 370 ms behind two such stores, and once
  // 2 s.
  int64_t peak_long_stores = 0;
  std::vector<int> priorities;      // priority of each stream that was created; 0 is the lowest
  std::vector<int32_t> stage_ends;  // CopyJob::stage_ends (in chunks) of the last kernel with stages
  int64_t records = 0;
  int64_t waits = 0;
  std::map<int, int64_t> bytes_of_device;  // bytes of enqueued copies, by the stream's device
  std::vector<cuda::SourceOrder> orders;
  std::vector<size_t> registered_bytes;  // bytes of each registration, in call order
  int64_t refused_registrations = 0;
  int64_t unregistered = 0;
};

// Resets all state except streams. Records a broken rule if the previous test has not released all its
// streams, registrations, contexts and captures.
void reset(const Settings& settings = {});
cuda::FindFunction finder();
cuda::CopyKernels copy_kernels();
// Runs the copy kernel on the CPU, one thread after another, from the last to the first.
void run_on_cpu(const cuda::CopyJob& job, int32_t warps);
Calls calls();
// Descriptions of the driver's rules that callers have broken since reset(); empty if no rule was broken.
std::vector<std::string> violations();
// Removes from the record the broken rules whose descriptions contain `words`. Returns whether there was such
// a rule. Control tests call this after they have broken a rule on purpose.
bool take_violation(const std::string& words);
// The size in bytes of each registered range of host memory, by its address.
std::map<void*, size_t> registered();

// The current device of this thread; -1 if it has none.
int current_device();
// Does what the CUDA runtime's cudaSetDevice does since CUDA 12: makes the device's primary context current,
// and creates it first if there is none. The fake records the creation as a broken rule. Tests use
// set_device() for the engine's threads, and as a control.
void set_device(int device);
// The number of references to each primary context, by device.
std::map<int, int64_t> primary_contexts();

// Begins a capture on the engine's stream, from this thread. `mode` is a constant such as
// cuda::kCaptureGlobal. end_capture() ends the capture, and returns whether the capture is still valid.
void begin_capture(uintptr_t stream, int mode = cuda::kCaptureGlobal);
bool end_capture(uintptr_t stream);
// This thread's capture mode.
int capture_mode();

// Refuses the next `count` registrations of host memory.
void refuse_registrations(int64_t count);
// Fails the next `count` launches of the copy kernel; kAlways fails all later launches.
inline constexpr int64_t kAlways = INT64_MAX;
void fail_launches(int64_t count);

// Fails the next `count` calls of `function` with `code`. The function is cuCtxPushCurrent, cuMemHostAlloc
// (which includes cuMemAlloc), cuEventRecord, cuStreamWriteValue32 or cuStreamIsCapturing. The name "the
// kernel that waits" stands for launches of the kernel that waits for a word in device memory.
inline constexpr cuda::Code kOutOfMemory = 2;
void refuse(const std::string& function, int64_t count, cuda::Code code = kOutOfMemory);
// Makes each later call that frees memory call `call` first.
void on_free(std::function<void()> call);
// Declares that these bytes of a test's memory are one allocation. No copy may span two allocations.
void add_allocation(void* memory, size_t bytes);

// Fails one later call that copies or launches the copy kernel. `nth` says which one: 0 is the next call; -1
// fails none.
void fail_copy(int64_t nth);
// While `breaks` is set, copies that are enqueued move no bytes. They put their stream into an error state,
// which every later wait on the host and every query reports.
void break_stream(bool breaks);
// Stops all existing streams if `held` is true; otherwise lets them continue.
void hold_all(bool held);

// Limits that the fake enforces. The comments in flexkv's code give the sources of these numbers.
inline constexpr size_t kMostBatchCopies = 4096;
inline constexpr int kMostMultiprocessors = 2;
inline constexpr int64_t kLongStoreCopy = 64 << 10;

// The next three functions act as the engine: they make a stream, enqueue work on it, and let a held stream
// run.
uintptr_t make_stream(bool held, int device = 0);
void enqueue(uintptr_t stream, std::function<void()> work);
void release_stream(uintptr_t stream);
// drain() sleeps until the stream has executed its queue; settle() sleeps until all streams have executed
// theirs.
void drain(uintptr_t stream);
void settle();
void destroy_stream(uintptr_t stream);

}  // namespace flexkv::fake_cuda
