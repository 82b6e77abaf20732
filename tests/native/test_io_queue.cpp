// Tests that every kind of I/O queue keeps the contract of io_queue.h for calls of wake().
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/thread_queue.h"
#include "io/uring_queue.h"

namespace flexkv {
namespace {

using MakeQueue = std::function<std::unique_ptr<IoQueue>()>;

std::vector<MakeQueue> kinds() {
  std::vector<MakeQueue> made = {[] { return std::make_unique<ThreadQueue>(2); }};
  if (const std::string refusal = uring_refusal(); refusal.empty()) {
    made.emplace_back([] { return std::make_unique<UringQueue>(2); });
  } else {
    MESSAGE("io_uring is not tested: " << refusal);
  }
  return made;
}

// Runs `before` on a new queue, then calls wait(). Returns whether wait() returned within `seconds`. If it
// did not, ends the wait with wake().
bool wait_ends(const MakeQueue& make, const std::function<void(IoQueue&)>& before, double seconds) {
  std::atomic<IoQueue*> queue{nullptr};
  std::atomic<bool> ended{false};
  std::thread owner([&] {
    const std::unique_ptr<IoQueue> made = make();
    before(*made);
    queue = made.get();
    std::vector<IoDone> done;
    made->wait(done);
    ended = true;
    while (queue != nullptr) std::this_thread::yield();  // the other thread may still call wake()
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!ended && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  const bool in_time = ended;
  while (queue == nullptr) std::this_thread::yield();
  if (!in_time) queue.load()->wake();
  while (!ended) std::this_thread::yield();
  queue = nullptr;
  owner.join();
  return in_time;
}

}  // namespace

TEST_CASE("a call of wake ends the next wait, also if a take came between") {
  std::vector<IoDone> done;
  for (const MakeQueue& make : kinds()) {
    CHECK(wait_ends(make, [](IoQueue& queue) { queue.wake(); }, 60));
    CHECK(wait_ends(
        make,
        [&](IoQueue& queue) {
          queue.wake();
          queue.take(done);
        },
        60));
    // Controls: wake() was not called, or an earlier wait() has consumed the call.
    CHECK(!wait_ends(make, [](IoQueue&) {}, 0.1));
    CHECK(!wait_ends(
        make,
        [&](IoQueue& queue) {
          queue.wake();
          queue.take(done);
          queue.wait(done);
        },
        0.1));
  }
}

}  // namespace flexkv
