// Emulates CUDA's kernel language in C++ on the CPU. A file that includes this header can compile and run the
// code of csrc/*/*_kernel.cuh. Every CUDA thread of every block is a thread of the operating system. All
// threads run at once, so that ThreadSanitizer detects races between warps and between lanes of one warp. At
// a shuffle the warp's 32 threads wait for each other, which orders their memory accesses; CUDA's shuffle
// does not guarantee such an order. Atomics are relaxed, as in CUDA. The emulated fence affects only the
// compiler, so tests with this header cannot detect that a fence is missing.
#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define FLEXKV_EMULATED_CUDA 1
#define __global__
#define __host__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulated {

inline constexpr unsigned kLanes = 32;
// How long a thread waits for the rest of its warp before the process aborts. If it waits longer, some lanes
// have taken a different branch and never arrive.
inline constexpr std::chrono::seconds kMeetingDeadline{120};

struct Index {
  unsigned x = 0;
};

class Meeting {
 public:
  // Waits until all lanes of the warp have called meet().
  void meet() {
    std::unique_lock lock(mutex_);
    const unsigned round = round_;
    if (++here_ == kLanes) {
      here_ = 0;
      round_ += 1;
      all_here_.notify_all();
      return;
    }
    if (all_here_.wait_for(lock, kMeetingDeadline, [&] { return round_ != round; })) return;
    std::fputs("emulated CUDA: the lanes of a warp do not meet at a shuffle\n", stderr);
    std::abort();
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned here_ = 0, round_ = 0;
};

struct Warp {
  Meeting meeting;
  // The values that the lanes give to a shuffle. Shuffles alternate between two arrays, so that a lane that
  // reaches the next shuffle early does not overwrite values that other lanes still have to read.
  std::array<std::array<uint64_t, kLanes>, 2> given;
};

inline thread_local Warp* warp = nullptr;
inline thread_local unsigned shuffles = 0;

// Faults that a control test injects into launches. A control test shows that a check fails if the kernel is
// wrong.
struct Faults {
  unsigned blocks_left_out = 0;
  bool shuffles_give_nothing = false;
};
inline Faults faults;  // changed only while no kernel runs

struct WithFaults {
  explicit WithFaults(const Faults& wanted) { faults = wanted; }
  ~WithFaults() { faults = {}; }
  WithFaults(const WithFaults&) = delete;
  WithFaults& operator=(const WithFaults&) = delete;
};

}  // namespace emulated

inline thread_local emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

// Runs `kernel` in `blocks` x `threads` threads, and returns when all threads have finished. `threads` is a
// multiple of 32.
template <typename Kernel>
void launch(unsigned blocks, unsigned threads, const Kernel& kernel) {
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::thread> running;
  for (unsigned block = 0; block + faults.blocks_left_out < blocks; ++block) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (thread % kLanes == 0) warps.push_back(std::make_unique<Warp>());
      running.emplace_back([=, &kernel, own = warps.back().get()] {
        threadIdx.x = thread;
        blockIdx.x = block;
        blockDim.x = threads;
        gridDim.x = blocks;
        warp = own;
        kernel();
      });
    }
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace emulated

inline uint64_t __shfl_down_sync(unsigned mask, uint64_t value, unsigned distance) {
  using namespace emulated;
  if (mask != 0xFFFFFFFFu) {
    std::fputs("emulated CUDA: only shuffles of the whole warp are known\n", stderr);
    std::abort();
  }
  const unsigned lane = threadIdx.x % kLanes;
  auto& given = warp->given[shuffles++ % 2];
  given[lane] = value;
  warp->meeting.meet();
  if (faults.shuffles_give_nothing) return 0;
  return lane + distance < kLanes ? given[lane + distance] : value;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long amount) {
#if defined(FLEXKV_EMULATED_PLAIN_ADD)  // a control: ThreadSanitizer must report this race
  const unsigned long long before = *at;
  *at = before + amount;
  return before;
#else
  return __atomic_fetch_add(at, amount, __ATOMIC_RELAXED);
#endif
}

inline unsigned atomicAdd(unsigned* at, unsigned amount) {
  return __atomic_fetch_add(at, amount, __ATOMIC_RELAXED);
}

inline unsigned atomicExch(unsigned* at, unsigned value) {
  return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

inline int atomicMin(int* at, int other) {
  int before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (other < before &&
         !__atomic_compare_exchange_n(at, &before, other, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

inline void __threadfence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline void __syncwarp() { emulated::warp->meeting.meet(); }
